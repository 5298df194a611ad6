"""Compares a validation with earlier ones, to find the best step and to stop a run early that no longer improves."""

import math
from collections.abc import Mapping
from typing import Self

from pydantic import BaseModel, Field

from splitppo.config import ConfigError
from splitppo.config.sections.evaluation import EarlyStopConfig, MetricMode
from splitppo.run_folder.summary import Best


def best_after(
    before: Best | None, metric: str, mode: MetricMode, step: int, metrics: Mapping[str, float]
) -> Best | None:
    """Compares the validation of `step` with `before`, the best one so far, and returns the better one.

    `before` is ignored if it was found by another metric or mode. Step 0 cannot be the best, because it has no
    checkpoint.
    """
    value = _value(metrics, metric, "checkpoint.best_metric")
    comparable = before if before is not None and (before.metric, before.mode) == (metric, mode) else None
    if step > 0 and _is_better(value, comparable.value if comparable else None, mode):
        return Best(metric=metric, mode=mode, step=step, value=value)
    return comparable


class Stagnation(BaseModel, frozen=True, extra="forbid"):
    """Counts the validations in a row whose metric was no better than the best one before them (early stopping)."""

    metric: str
    mode: MetricMode
    best: float | None = Field(None, description="best value; null before the first finite one")
    num_validations: int = Field(0, ge=0, description="validations in a row since the best one")

    @classmethod
    def after(cls, before: Self | None, config: EarlyStopConfig, metrics: Mapping[str, float]) -> Self | None:
        """Counts one more validation, and returns the new count as a `Stagnation`; None without early stopping."""
        if config.metric is None:
            return None
        value = _value(metrics, config.metric, "evaluation.early_stop.metric")
        if before is None or (before.metric, before.mode) != (config.metric, config.mode):
            before = cls(metric=config.metric, mode=config.mode)
        if _is_better(value, before.best, config.mode, config.min_delta):
            return before.model_copy(update={"best": value, "num_validations": 0})
        return before.model_copy(update={"num_validations": before.num_validations + 1})

    @property
    def reason(self) -> str:
        """The reason why the run ends early, as one sentence for the log."""
        best = "" if self.best is None else f", which was {self.best:g} before"
        count = "one validation" if self.num_validations == 1 else f"{self.num_validations} validations in a row"
        return f"stopped early: {count} gave no better {self.metric}{best}"

    def ends(self, config: EarlyStopConfig) -> bool:
        """Returns True if `patience` validations in a row gave no better value of the configured metric."""
        is_same = (self.metric, self.mode) == (config.metric, config.mode)
        return is_same and self.num_validations >= config.patience


def _is_better(value: float, best: float | None, mode: MetricMode, min_delta: float = 0.0) -> bool:
    """Returns True if a value beats the best one by over `min_delta`; NaN never does, the first number always."""
    if not math.isfinite(value):
        return False
    return best is None or (value > best + min_delta if mode == "max" else value < best - min_delta)


def _value(metrics: Mapping[str, float], name: str, key: str) -> float:
    """Returns the metric that the configuration key names; ConfigError if validation does not compute it."""
    if name not in metrics:
        raise ConfigError(f"{key}: validation gives no {name!r}; it gives {', '.join(sorted(metrics))}")
    return metrics[name]
