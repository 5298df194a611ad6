"""Sum, mean, variance and whitening over the positions that a mask marks; and division of rows into blocks.

B sequences, T response tokens. Everything is computed in float64, and values outside the mask have no influence, even
NaN. Statistics over all positions work on `CHUNK` positions at a time: memory for all of them in float64 costs more
time than the arithmetic. Formulas on [B, T] arrays work on one block of rows at a time, for the same reason.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating[Any]]
Float32s = NDArray[np.float32]
Float64s = NDArray[np.float64]
Mask = NDArray[np.bool_]

CHUNK = 1 << 18


def masked_sum(values: Floats, mask: Mask, axis: int | None = None) -> Float64s:
    """Sums the values at the positions that the mask marks, along `axis` or over all positions; float64."""
    if axis is not None:
        return np.asarray(np.where(mask, values, 0.0).sum(axis=axis, dtype=np.float64))
    return np.asarray(sum(float(np.where(within, part, 0.0).sum()) for part, within in _chunks(values, mask)))


def masked_mean(values: Floats, mask: Mask, axis: int | None = None) -> Float64s:
    """Averages the values at the positions that the mask marks, along `axis` or over all; 0 for an empty mask."""
    return np.asarray(masked_sum(values, mask, axis) / (mask.sum(axis=axis) + 1e-8))


def masked_var(values: Floats, mask: Mask) -> float:
    """Returns the unbiased variance of masked values, sum of (x - mean)^2 / (n - 1); ValueError for fewer than two."""
    count = int(mask.sum())
    if count < 2:
        raise ValueError(f"a variance needs at least two response tokens in the batch, got {count}")
    return _sum_of_squares(values, mask) / (count + 1e-8) * count / (count - 1)


def variance(values: Floats) -> float:
    """Returns the biased variance of all values, sum of (x - mean)^2 / n; 0 without values."""
    return _sum_of_squares(values, np.ones(values.shape, np.bool_)) / max(values.size, 1)


def _sum_of_squares(values: Floats, mask: Mask) -> float:
    """Returns the sum of (x - mean)^2 over the positions that the mask marks."""
    mean = masked_sum(values, mask) / max(int(mask.sum()), 1)
    return float(sum(masked_sum((part - mean) ** 2, within) for part, within in _chunks(values, mask)))


def masked_whiten(values: Floats, mask: Mask) -> Floats:
    """Whitens values over the mask, (x - mean) / sqrt(var + 1e-8); zero outside the mask, shape and dtype of `values`.

    A single value is its own mean, so that it becomes 0.
    """
    if mask.sum() < 2:
        return np.zeros_like(values)
    mean = masked_mean(values, mask)
    std = np.sqrt(masked_var(values, mask) + 1e-8)
    whitened = np.empty(mask.size, values.dtype)
    start = 0
    for part, within in _chunks(values, mask):
        whitened[start : start + len(part)] = np.where(within, (part - mean) / std, 0.0)
        start += len(part)
    return whitened.reshape(values.shape)


def _chunks(values: Floats, mask: Mask) -> Iterator[tuple[Float64s, Mask]]:
    """Yields flat pieces of `CHUNK` positions: (values as float64, mask)."""
    flat = values.reshape(-1)
    within = mask.reshape(-1)
    for start in range(0, len(flat), CHUNK):
        yield flat[start : start + CHUNK].astype(np.float64), within[start : start + CHUNK]


def blocks(lengths_B: NDArray[np.int32], num_tokens: int, *, num_samples: int = 1) -> Iterator[tuple[int, int]]:
    """Divides B rows of tokens into blocks and yields (start, stop) of each: at most `num_tokens` when padded.

    The `num_samples` responses to one prompt stay in one block. With few tokens, float64 arrays of them stay in a
    core's cache. With many, the recursion over the tokens of a response handles more responses per call.
    """
    num_rows = num_samples * max(1, num_tokens // (num_samples * int(lengths_B.max(initial=1))))
    return ((start, min(start + num_rows, len(lengths_B))) for start in range(0, len(lengths_B), num_rows))
