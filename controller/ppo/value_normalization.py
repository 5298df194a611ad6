"""Values on the scale that the critic learns: returns minus their mean, over their deviation.

The statistics are those of all returns that the critic has learned so far (as ValueNorm of MAPPO; Yu et al., 2022):

    step k:  V = v * std_{k-1} + mean_{k-1}             v: what the critic says; its weights know step k-1's scale
             R = A + V                                  GAE, on the scale of the rewards
             mean_k, std_k: with the R of step k
             it learns  (R - mean_k) / std_k,  its old values are  (V - mean_k) / std_k

so that values, advantages and returns mean the same whether values are normalised or not. Before the first update, and
where nothing is normalised, mean is 0 and std is 1.
"""

import numpy as np

from controller.ppo.running_moments import Moments
from splitppo.batch import Column

MIN_VARIANCE = 1e-2  # as in ValueNorm: of returns that hardly differ, no more is made


def value_std(moments: Moments) -> float:
    """By which values are divided."""
    return max(moments.variance, MIN_VARIANCE) ** 0.5 if moments.count else 1.0


def normalize(values: Column, mask: Column, moments: Moments) -> Column:
    """(x - mean) / std, zero outside the mask; float32, float64 inside."""
    scaled = (values.values - np.float64(moments.mean)) / value_std(moments)
    return Column(np.where(mask.values, scaled, 0.0).astype(np.float32), values.lengths)


def denormalize(values: Column, moments: Moments) -> Column:
    """X * std + mean; float32, float64 inside."""
    scaled = values.values * np.float64(value_std(moments)) + moments.mean
    return Column(scaled.astype(np.float32), values.lengths)
