"""Statistics over the positions that a mask marks. B sequences, T response tokens.

Everything is computed in float64 and never looks at a value outside the mask, so NaN there does no harm.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating[Any]]
Float32s = NDArray[np.float32]
Float64s = NDArray[np.float64]
Mask = NDArray[np.bool_]


def masked_sum(values: Floats, mask: Mask, axis: int | None = None) -> Float64s:
    """Sum over the mask, along `axis` or over everything."""
    return np.asarray(np.where(mask, values, 0.0).sum(axis=axis, dtype=np.float64))


def masked_mean(values: Floats, mask: Mask, axis: int | None = None) -> Float64s:
    """Mean over the mask, along `axis` or over everything; 0 where the mask is empty."""
    return np.asarray(masked_sum(values, mask, axis) / (mask.sum(axis=axis) + 1e-8))


def masked_var(values: Floats, mask: Mask) -> float:
    """Unbiased variance over the mask: sum of (x - mean)^2 / (n - 1). ValueError for fewer than two positions."""
    count = int(mask.sum())
    if count < 2:
        raise ValueError(f"a variance needs at least two response tokens in the batch, got {count}")
    deviations = np.asarray(values, np.float64) - masked_mean(values, mask)
    return float(masked_mean(deviations**2, mask)) * count / (count - 1)


def masked_whiten(values: Floats, mask: Mask) -> Float64s:
    """(x - mean) / sqrt(var + 1e-8) over the mask, zero outside it; errors as of `masked_var`."""
    centred = np.asarray(values, np.float64) - masked_mean(values, mask)
    return np.where(mask, centred / np.sqrt(masked_var(values, mask) + 1e-8), 0.0)
