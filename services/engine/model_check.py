"""Proves on request that the engine can compute with a model, in one process and without a group."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from services.engine.frozen_model import FrozenModel
from services.engine.inference import check_sequence_ranks
from services.engine.model.loading import PixelLimits
from services.engine.model.weights import Kind
from splitppo.config import ComputedModelConfig


def check_model(
    key: str,
    config: ComputedModelConfig,
    kind: Kind,
    *,
    devices: Sequence[int],
    sequence_ranks: int = 1,
    pixel_limits: PixelLimits = (None, None),
    also: Callable[[Any, torch.device], None] = lambda *_: None,
) -> str:
    """Loads a model, proves its forward, and returns a line that says so. Adapters are left out.

    `key` of the configuration names the model. The first of the `devices` (GPUs of the group) computes if this machine
    has it, else the CPU. `sequence_ranks` ranks divide the positions of rows among them. For `pixel_limits` see
    `build_model`. `also` is a further check of
    the loaded model on its device.

    Raises:
        ValueError: the model cannot be loaded, computes other numbers than its own forward, or `also` refuses it.
    """
    began_s = time.perf_counter()
    has_gpu = bool(devices) and devices[0] < torch.cuda.device_count()
    device = torch.device("cuda", devices[0]) if has_gpu else torch.device("cpu")
    frozen = FrozenModel(config, kind=kind, device=device, pixel_limits=pixel_limits)
    check_sequence_ranks(config, frozen.model, frozen.limits, sequence_ranks)
    with frozen.weights.awake():
        also(frozen.model, device)
    rows = "packed" if frozen.limits.packed else "padded"
    return (
        f"{key}: {frozen.model.config.model_type} computes as its own forward does, in {rows} rows: at most"
        f" {frozen.proved.largest:.1g} apart ({time.perf_counter() - began_s:.1f} s with loading, on {device})"
    )
