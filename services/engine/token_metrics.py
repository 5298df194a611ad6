"""Metrics of an update: means over response tokens, summed where the tokens are and divided once all is added up.

A loss returns scalars that the engine adds over micro-batches and ranks; no micro-batch knows the number of all tokens.

Shapes: N response tokens of all rows of a micro-batch, packed.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

_NUM_TOKENS = "num_tokens"
_SUM = "sum/"


def token_sums(values: Mapping[str, Tensor], mask_N: Tensor) -> dict[str, Tensor]:
    """Sums of [N] values over the tokens of the mask, without gradient, and their number, for `token_means`."""
    sums = {_SUM + name: torch.where(mask_N, value_N.detach(), 0.0).sum() for name, value_N in values.items()}
    return {**sums, _NUM_TOKENS: mask_N.sum().float()}


def token_means(metrics: Mapping[str, float]) -> dict[str, float]:
    """Metrics in which what `token_sums` made has become means under the plain names."""
    num_tokens = max(metrics.get(_NUM_TOKENS, 0.0), 1.0)
    return {
        name.removeprefix(_SUM): value / num_tokens if name.startswith(_SUM) else value
        for name, value in metrics.items()
        if name != _NUM_TOKENS
    }


def metrics_of_role(role: str, metrics: Mapping[str, float]) -> dict[str, float]:
    """What a role reports of its update, under the metrics' names: <role>/<name>, but perf/mfu/<role>."""
    return {f"perf/mfu/{role}" if name == "mfu" else f"{role}/{name}": value for name, value in metrics.items()}
