"""Computes the metrics of an update: sums over micro-batches and ranks, then means over response tokens.

Shapes: N response tokens of all rows of a micro-batch, packed.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from services.engine import parallel


@dataclass(frozen=True, eq=False)
class LossOutput:
    """The loss of one micro-batch on one rank, and the values from which metrics are computed."""

    loss: Tensor  # sum(weights * token losses), a differentiable scalar
    sums: Mapping[str, Tensor]  # metrics that are summed with the same weights, scalars
    token_values: Mapping[str, Tensor]  # [N] each; the metric is their mean over the tokens that count


@dataclass(frozen=True, eq=False)
class MetricSums:
    """The metrics of one optimizer step before division: scalars that add up over micro-batches and ranks."""

    totals: Mapping[str, Tensor]  # "loss", `LossOutput.sums` and `token_values` (summed over tokens that count)
    num_tokens: Tensor  # that count
    means: frozenset[str]  # names of totals that become metrics by a division by num_tokens

    @classmethod
    @torch.no_grad()
    def of(cls, output: LossOutput, mask_N: Tensor, num_copies: int = 1) -> "MetricSums":
        """Sums the loss and metrics of one micro-batch over its tokens, without gradient.

        `num_copies` ranks compute the same, so each counts for its part.
        """
        totals = {name: value.detach() for name, value in {"loss": output.loss, **output.sums}.items()}
        totals |= {name: torch.where(mask_N, x_N, 0.0).sum() for name, x_N in output.token_values.items()}
        totals = {name: value / num_copies for name, value in totals.items()} if num_copies > 1 else totals
        return cls(totals, mask_N.sum() / num_copies, frozenset(output.token_values))

    def __add__(self, other: "MetricSums") -> "MetricSums":
        totals = {name: value + other.totals[name] for name, value in self.totals.items()}
        return MetricSums(totals, self.num_tokens + other.num_tokens, self.means)


class MetricLimit(NamedTuple):
    """The name of a metric (in `LossOutput.token_values`), and the value above which an update ends early."""

    metric: str
    value: float


def token_mean(step: MetricSums, metric: str, device: torch.device) -> float:
    """Computes the mean of a metric over all ranks' tokens in one optimizer step. Collective; waits for the device.

    `metric` is a name in `LossOutput.token_values`.
    """
    total, num_tokens = parallel.reduce_array([step.totals[metric].item(), step.num_tokens.item()], device)
    return float(total / max(num_tokens, 1.0))


def reduce_metrics(steps: Sequence[MetricSums]) -> dict[str, float]:
    """Reduces optimizer steps to the metrics of an update: sums over ranks, means over steps and over tokens.

    Every rank has equally many steps. Collective.
    """
    if not steps:
        return {}
    scalars = [[*step.totals.values(), step.num_tokens] for step in steps]
    means_K = torch.stack([torch.stack([value.float() for value in step]) for step in scalars]).mean(0)
    *totals, num_tokens = parallel.all_reduce(means_K).tolist()
    return {
        name: total / max(num_tokens, 1.0) if name in steps[0].means else total
        for name, total in zip(steps[0].totals, totals, strict=True)
    }


@dataclass
class UpdateSteps:
    """Collects the optimizer steps of one update (applied, skipped, empty, stopped) and computes the update's metrics.

    Attributes:
        num_empty: mini-batches in which no token counts on any rank.
        num_stopped: steps that were not applied because the update ended early.
        steps: the sums and the gradient norm of each optimizer step, which was applied if the norm is finite.
    """

    num_empty: int = 0
    num_stopped: int = 0
    steps: list[tuple[MetricSums, float]] = field(default_factory=list)

    def metrics(self, *, may_stop: bool) -> dict[str, float]:
        """Computes loss metrics and "grad_norm" (before clipping) as means over applied steps, and counts of steps.

        Without any applied step the metrics of the loss are absent, and "grad_norm" is NaN, or absent where no gradient
        was computed for a step. "num_stopped_steps" is present if `may_stop`. Collective.
        """
        applied = [(sums, norm) for sums, norm in self.steps if math.isfinite(norm)]
        metrics = reduce_metrics([sums for sums, _ in applied])
        if self.steps:
            metrics["grad_norm"] = sum(norm for _, norm in applied) / len(applied) if applied else math.nan
        if may_stop:
            metrics["num_stopped_steps"] = float(self.num_stopped)
        return {
            **metrics,
            "num_skipped_steps": float(len(self.steps) - len(applied)),
            "num_empty_steps": float(self.num_empty),
        }


def metrics_of_role(role: str, metrics: Mapping[str, float]) -> dict[str, float]:
    """Renames the metrics of a role's update to their full names: <role>/<name>, but perf/mfu/<role>.

    Names that begin with distillation/ are full already.
    """
    full = {"mfu": f"perf/mfu/{role}", **{name: name for name in metrics if name.startswith("distillation/")}}
    return {full.get(name, f"{role}/{name}"): value for name, value in metrics.items()}


def rank_tokens(num_tokens: float, device: torch.device) -> dict[str, float]:
    """Returns the minimum, maximum and mean over ranks of the tokens in an epoch, as metrics tokens_rank_*."""
    tokens = np.zeros(parallel.num_ranks())
    tokens[parallel.rank()] = num_tokens
    tokens = parallel.reduce_array(tokens, device)
    return {f"tokens_rank_{name}": float(getattr(tokens, name)()) for name in ("min", "max", "mean")}
