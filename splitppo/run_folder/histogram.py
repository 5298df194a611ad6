"""Counts how numbers are distributed, for the record of a step and for what the viewer computes itself."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

QUANTILES = (0.01, 0.1, 0.5, 0.9, 0.99)
_NUM_BINS = 48
_SHARE_OF_TAIL = 0.001


def histogram(values: NDArray[Any]) -> dict[str, list[float]]:
    """Counts finite values in 48 bins; the first and the last bin reach to the smallest and the largest value.

    The other bins have equal widths between the quantiles 0.001 and 0.999, or, if these are one number, between the
    extremes; without any width, all lie half a unit around it. `quantiles` are those at 0.01, 0.1, 0.5, 0.9 and 0.99,
    which bins of such different widths do not tell. Empty if no value is finite.
    """
    ordered = np.sort(values[np.isfinite(values)])
    if not len(ordered):
        return {}
    low, high, *quantiles = _quantiles(ordered, (_SHARE_OF_TAIL, 1.0 - _SHARE_OF_TAIL, *QUANTILES))
    least = float(ordered[0])
    most = float(ordered[-1])
    if low == high:
        low, high = (least, most) if least < most else (least - 0.5, most + 0.5)
    edges = np.linspace(low, high, _NUM_BINS + 1)
    counts = np.diff(np.searchsorted(ordered, edges[1:-1]), prepend=0, append=len(ordered))
    edges[0] = min(least, low)
    edges[-1] = max(most, high)
    return {"edges": [*map(short, edges)], "counts": counts.tolist(), "quantiles": [*map(short, quantiles)]}


def _quantiles(ordered: NDArray[Any], shares: Sequence[float]) -> list[float]:
    """Returns quantiles of sorted numbers, linear between neighbours."""
    places = np.multiply(shares, len(ordered) - 1)
    below = places.astype(np.int64)
    lows, highs = (ordered[place].astype(np.float64) for place in (below, np.minimum(below + 1, len(ordered) - 1)))
    return list((lows + (places - below) * (highs - lows)).tolist())


def short(number: float) -> float:
    """Rounds to seven digits, for the footer of a step is text and not compressed."""
    return float(f"{number:.7g}")
