"""A small model, and its weights as published files."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from services.engine.exchange import (
    NamedWeights,
    PublishedWeights,
    Publisher,
)
from tests.support.engines import CPU, silent

RUN = "run"
FP32 = torch.float32


class Model(nn.Module):
    """A small model with a tied weight and a scalar; the other values are 0, 1, 2, ..."""

    def __init__(self, *, width: int = 3) -> None:
        super().__init__()
        self.config = PreTrainedConfig(model_type="small", hidden_size=width)
        self.embed = nn.Parameter(torch.arange(5.0 * width).reshape(5, width))
        self.scale = nn.Parameter(torch.tensor(0.1))
        self.norm = nn.Parameter(torch.arange(float(width)))
        self.head = self.embed

    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())

    def whole_weights(self, dtype: torch.dtype) -> NamedWeights:
        return ((name, parameter.detach().to(dtype)) for name, parameter in self.named_parameters())


def publisher(folder: Path, model: Model | None = None, dtype: torch.dtype = FP32) -> Publisher:
    model = model or Model()
    return Publisher(folder, model, model.whole_weights, dtype, CPU)


def publish(folder: Path, version: int, *, keep_from: int = 0, model: Model | None = None) -> str:
    return publisher(folder, model).publish(RUN, version, keep_from, silent)


def read(folder: Path, version: int, manifest_sha256: str) -> dict[str, Tensor]:
    """Verifies a version and returns copies of its weights."""
    published = PublishedWeights.open(folder, version, manifest_sha256)
    published.verify()
    return {name: weight.clone() for name, weight in published.weights()}
