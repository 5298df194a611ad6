"""A model that only computes: the reference, the reward model."""

from collections.abc import Sequence
from typing import Any

import torch

from services.engine import parallel
from services.engine.inference import ReportProgress, compute_columns, micro_batch_limits
from services.engine.model.forward import RESPONSE_METHOD, Forward
from services.engine.model.loading import build_model, fill_model
from services.engine.model.weights import Kind
from splitppo.batch import Batch, Column
from splitppo.config import ComputedModelConfig


class FrozenModel:
    """A model without optimizer or gradient, sharded; its weights are kept in the compute dtype."""

    def __init__(self, config: ComputedModelConfig, *, kind: Kind = "policy", device: torch.device) -> None:
        dtype = torch.bfloat16 if config.dtype == "bf16" else torch.float32
        self.model: Any = build_model(config.model, kind, dtype=dtype)
        self.model.requires_grad_(requires_grad=False)
        self.device = device
        self.limits = micro_batch_limits(config, self.model)
        parallel.shard(self.model, device=device, bf16=False, forward_method=RESPONSE_METHOD)
        fill_model(self.model, config.model, kind)

    def compute(
        self, batch: Batch, forward: Forward, *, outputs: Sequence[str], progress: ReportProgress
    ) -> dict[str, Column]:
        """See `compute_columns`."""
        return compute_columns(
            self.model, batch, forward, outputs=outputs, limits=self.limits, device=self.device, progress=progress
        )
