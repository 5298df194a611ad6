"""The memory metrics of the actor."""

from __future__ import annotations

import torch

from services.engine.memory_metrics import memory_metrics


def test_main_memory_in_use_is_a_plausible_number() -> None:
    assert 0.01 < memory_metrics(torch.device("cpu"))["perf/cpu_memory_used_gb"] < 100_000
