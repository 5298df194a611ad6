"""Computes pseudo-random bits from a number alone, so that they are the same on every machine and in any order."""

import numpy as np
from numpy.typing import NDArray

# The step between two states of one generator.
GAMMA = np.uint64(0x9E3779B97F4A7C15)


def splitmix64(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Returns the next output of SplitMix64 (Steele et al., 2014) for each uint64 state; sums wrap around silently."""
    mixed = np.atleast_1d(state) + GAMMA
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (mixed ^ (mixed >> np.uint64(31))).reshape(state.shape)
