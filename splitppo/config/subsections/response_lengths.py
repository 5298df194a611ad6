"""The configuration key `debug.response_lengths`: forces each response to a length computed from its sampling seed."""

from math import exp
from statistics import NormalDist
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from splitppo.config.section import PositiveInt, Section

_DOMAIN = 0x6C656E67  # makes these draws independent of other draws with the same seed


class UniformLengths(Section):
    """Uniformly distributed response lengths: every number of tokens from `low` to `high` is equally likely."""

    kind: Literal["uniform"]
    low: PositiveInt
    """The smallest number of tokens."""

    high: PositiveInt
    """The largest number of tokens."""

    def _check_keys(self) -> None:
        if self.low > self.high:
            raise ValueError(f"low must not exceed high, got {self.low} and {self.high}")

    def of(self, seed: int) -> int:
        """Returns the number of tokens that a response with this sampling seed must have."""
        return self.low + int(_uniform(seed) * (self.high - self.low + 1))


class LogNormalLengths(Section):
    """Response lengths with a long tail: `median` * exp(`sigma` * z) tokens, z standard normal, from 1 to `max`."""

    kind: Literal["log_normal"]
    median: float = Field(ge=1.0)
    """The median number of tokens, before `max` applies."""

    sigma: float = Field(1.0, ge=0.0)
    """The standard deviation of the logarithm of the length."""

    max: PositiveInt
    """The largest number of tokens; longer lengths are cut to it."""

    def of(self, seed: int) -> int:
        """Returns the number of tokens that a response with this sampling seed must have."""
        drawn = self.median * exp(self.sigma * NormalDist().inv_cdf(_uniform(seed)))
        return max(1, min(self.max, round(drawn)))


ResponseLengths = Annotated[UniformLengths | LogNormalLengths, Field(discriminator="kind")]


def _uniform(seed: int) -> float:
    """Returns a pseudo-random number in (0, 1) that depends on an int64 seed only."""
    return (int(np.random.PCG64([_DOMAIN, seed % 2**64]).random_raw()) // 2**12 + 0.5) / 2**52
