"""Counts how numbers are distributed, for the record of a step and for what the viewer computes itself."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

QUANTILES = (0.01, 0.1, 0.5, 0.9, 0.99)
_NUM_BINS = 48
_SHARE_OF_TAIL, _MAX_SAMPLE = 0.001, 20_000


def histogram(values: NDArray[Any]) -> dict[str, list[float]]:
    """Counts finite values in 48 bins; the first and the last bin reach to the smallest and the largest value.

    The other bins have equal widths between the quantiles 0.001 and 0.999 of some of the values. `quantiles` are those
    of all values at 0.01, 0.1, 0.5, 0.9 and 0.99, which bins of such different widths do not tell. Empty if no
    value is finite.
    """
    finite = values[np.isfinite(values)].astype(np.float64)
    if not len(finite):
        return {}
    least, most = float(finite.min()), float(finite.max())
    some = finite[:: max(1, len(finite) // _MAX_SAMPLE)]
    low, high = np.quantile(some, (_SHARE_OF_TAIL, 1.0 - _SHARE_OF_TAIL))
    if low == high:
        low, high = least, most
    counts, edges = np.histogram(np.clip(finite, low, high), _NUM_BINS, (low, high))
    edges[0], edges[-1] = min(least, edges[0]), max(most, edges[-1])
    quantiles = np.quantile(finite, QUANTILES)
    return {"edges": [*map(short, edges)], "counts": counts.tolist(), "quantiles": [*map(short, quantiles)]}


def short(number: float) -> float:
    """Rounds to seven digits, for the footer of a step is text and not compressed."""
    return float(f"{number:.7g}")
