"""Mean and variance over all steps of a run: state, which is stored with every checkpoint."""

import math
from typing import Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from controller.ppo.masked_stats import Floats, variance


class Moments(BaseModel):
    """Of all values so far; immutable. float64, so that JSON gives back the same bits."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    count: int = Field(0, ge=0)
    mean: float = 0.0
    squares: float = Field(0.0, ge=0.0, description="sum of (x - mean)^2")

    @property
    def variance(self) -> float:
        """Squares / count; 0 of nothing."""
        return self.squares / max(self.count, 1)

    @property
    def std(self) -> float:
        """Square root of the variance."""
        return math.sqrt(self.variance)

    def including(self, values: Floats) -> Self:
        """With further values (Chan et al., 1979, "Updating formulae and a pairwise algorithm").

        d = mean of the values - mean so far:
        mean' = mean + d * n / (count + n),  squares' = squares + sum of (x - mean of the values)^2 + d^2 * count * n
        / (count + n)
        """
        if not (num_values := values.size):
            return self
        count = self.count + num_values
        distance = float(np.mean(values, dtype=np.float64)) - self.mean
        squares = variance(values) * num_values + distance**2 * self.count * num_values / count
        return self.model_copy(
            update={
                "count": count,
                "mean": self.mean + distance * num_values / count,
                "squares": self.squares + squares,
            }
        )


class RunningMoments(BaseModel):
    """What is normalised by statistics of the whole run; of what is not, there are none."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    scores: Moments = Field(Moments(), description="of responses, as they were given: reward.shaping.running_scale")
    returns: Moments = Field(Moments(), description="of learned tokens, as of the critic: critic.normalize_values")
