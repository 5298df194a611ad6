"""Mean and variance over all steps of a run, which scale the scores and the values that the critic learns.

The critic learns returns minus their mean, divided by their standard deviation. Mean and deviation are those of all
returns that the critic has learned so far (ValueNorm of MAPPO; Yu et al., 2022):

    step k:  V = v * std_{k-1} + mean_{k-1}             v: the critic's output; its weights know step k-1's scale
             R = A + V                                  GAE, on the scale of the rewards
             mean_k, std_k: with the R of step k
             it learns  (R - mean_k) / std_k,  its old values are  (V - mean_k) / std_k

so that values, advantages and returns mean the same with and without normalised values. Before the first update, and
without normalisation, mean is 0 and std is 1.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from controller.ppo.masked_stats import Floats, variance
from splitppo.batch import Batch, Column
from splitppo.config.subsections.reward_shaping import RewardShapingConfig

MIN_VARIANCE = 1e-2  # the value of ValueNorm: returns that hardly differ are not scaled up


class Moments(BaseModel):
    """Count, mean and variance of scores or returns over all steps so far; immutable.

    The numbers are float64, so that JSON gives back the same bits.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    count: int = Field(0, ge=0)
    mean: float = 0.0
    squares: float = Field(0.0, ge=0.0, description="sum of (x - mean)^2")

    @property
    def variance(self) -> float:
        """The biased variance: the sum of squared deviations over the count; 0 without values."""
        return self.squares / max(self.count, 1)

    @property
    def std(self) -> float:
        """The standard deviation: the square root of the variance; 0 without values."""
        return math.sqrt(self.variance)

    @property
    def value_std(self) -> float:
        """The divisor of normalised values: the standard deviation, at least sqrt(MIN_VARIANCE); 1 without values."""
        return max(self.variance, MIN_VARIANCE) ** 0.5 if self.count else 1.0

    def including(self, values: Floats) -> Self:
        """Adds further values and returns the new count, mean and sum of squares as `Moments`.

        d = mean of the values - mean so far:
        mean' = mean + d * n / (count + n),  squares' = squares + sum of (x - mean of the values)^2 + d^2 * count * n
        / (count + n)  (Chan et al., 1979, "Updating formulae and a pairwise algorithm").
        """
        if not (num_values := values.size):
            return self
        count = self.count + num_values
        distance = float(np.mean(values, dtype=np.float64)) - self.mean
        squares = variance(values) * num_values + distance**2 * self.count * num_values / count
        mean = self.mean + distance * num_values / count
        return self.model_copy(update={"count": count, "mean": mean, "squares": self.squares + squares})

    def normalize(self, values: Column, learned: Column) -> Column:
        """Normalises token values to (x - mean) / std, zero on tokens not in `learned`; float32, float64 inside."""
        scaled = (values.values - np.float64(self.mean)) / self.value_std
        return Column(np.where(learned.values, scaled, 0.0).astype(np.float32), values.lengths)

    def denormalize(self, values: Column) -> Column:
        """Undoes the normalisation of token values: x * std + mean; float32, float64 inside."""
        scaled = values.values * np.float64(self.value_std) + self.mean
        return Column(scaled.astype(np.float32), values.lengths)


class RunningMoments(BaseModel):
    """Count, mean and variance of the scores and returns of the run so far; every checkpoint stores them.

    Both are empty if neither scores nor values are normalised.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    scores: Moments = Field(Moments(), description="of responses before shaping: reward.shaping.running_scale")
    returns: Moments = Field(Moments(), description="of learned tokens: critic.normalize_values")


@dataclass(frozen=True)
class Normalization:
    """How scores and critic values are scaled, with the mean and variance of the run before this step."""

    shaping: RewardShapingConfig = field(default_factory=RewardShapingConfig)
    normalize_values: bool = False  # critic.normalize_values
    running: RunningMoments = field(default_factory=RunningMoments)

    def scores_including(self, scores_B: Floats) -> Moments:
        """Returns the moments of all unshaped scores of the run, this step included; empty if scores are not scaled."""
        return self.running.scores.including(scores_B) if self.shaping.running_scale else Moments()

    def returns_including(self, returns_N: Floats) -> Moments:
        """Returns the moments of all returns of the run, this step included; empty if values are not normalised."""
        return self.running.returns.including(returns_N) if self.normalize_values else Moments()

    def denormalized(self, rollouts: Batch) -> Batch:
        """Returns the rollouts with the critic's values, if they have any, converted to the scale of the rewards."""
        if "values" not in rollouts or not self.running.returns.count:
            return rollouts
        values = self.running.returns.denormalize(rollouts["values"])
        return rollouts.merge(Batch(rollouts.num_rows, {"values": values}))


def running_metrics(running: RunningMoments) -> Mapping[str, float]:
    """Makes the metrics reward/running_std and critic/value_norm/..., each only if that normalisation is used."""
    scores = running.scores
    returns = running.returns
    metrics = {"reward/running_std": scores.std} if scores.count else {}
    if returns.count:
        metrics |= {"critic/value_norm/mean": returns.mean, "critic/value_norm/std": returns.value_std}
    return metrics


# Scores and values stay as they are.
NO_NORMALIZATION = Normalization()
