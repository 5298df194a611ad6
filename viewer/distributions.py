"""How the policy's numbers spread over the tokens of each step: of all tokens by footers, of some by their lists."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from viewer.files import RunDir
from viewer.step_files import Float64s, read_drawn
from viewer.summaries import StepFiles, mapping, rounded

MAX_STEPS, MAX_BINS = 300, 100
_BINS, _TAIL = 48, 0.001
_OF_ALL = {"kl": "log_ratio_ref", "mismatch": "log_ratio_rollout"}


class Distributions:
    """The histograms of a run's steps."""

    def __init__(self, folder: RunDir) -> None:
        self._folder, self._files = folder, StepFiles(folder, _read)

    def since(self, since: int = -1, most: int = MAX_STEPS) -> dict[str, Any]:
        """Returns {"steps", "columns"}: at most 300 recorded steps, and what the first `most` after `since` have.

        Every 2^n-th step is there, so that a page which has the columns up to `since` needs no others of before.
        """
        steps, stride = self._folder.steps("train"), 1
        while len(steps) > MAX_STEPS * stride:
            stride *= 2
        new = [step for step in steps[::stride] if step > since][:most]
        return {"steps": steps[::stride], "columns": [{**self._files.get(step), "step": step} for step in new]}


def _read(folder: RunDir, step: int) -> dict[str, Any]:
    """Reads a step's histograms and means by position; what it has not recorded is left out."""
    footer, drawn = read_drawn(folder, step)
    found = {name: _checked(mapping(mapping(footer, "histograms"), key)) for name, key in _OF_ALL.items()}
    if {"new", "old"} <= drawn.keys():
        found["ratio"] = _histogram(np.exp(np.clip(drawn["new"] - drawn["old"], -80.0, 80.0)))
    if "entropy_tokens" in drawn:
        found["entropy"] = _histogram(drawn["entropy_tokens"])
    places = {f"{name}_by_position": rounded(mapping(footer, "by_position").get(name), 9) for name in _OF_ALL}
    return {name: value for name, value in (found | places).items() if value}


def _checked(histogram: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Returns a histogram of a footer; None if it is none."""
    try:
        edges, counts = (np.array(histogram.get(name), np.float64) for name in ("edges", "counts"))
    except (TypeError, ValueError, OverflowError):
        return None
    fits = counts.ndim == 1 and edges.shape == (len(counts) + 1,) and 0 < len(counts) <= MAX_BINS
    is_known = fits and np.isfinite([*edges, *counts]).all() and (np.diff(edges) >= 0).all()
    return (
        {"edges": edges.tolist(), "counts": counts.tolist()} if is_known and counts.min() >= 0 < counts.sum() else None
    )


def _histogram(values_N: Float64s) -> Mapping[str, Any] | None:
    """Counts numbers as the footers do: the first and the last bin reach to the extremes."""
    known_N = values_N[np.isfinite(values_N)]
    if not len(known_N):
        return None
    low, high = np.quantile(known_N, (_TAIL, 1 - _TAIL))
    counts, edges = np.histogram(np.clip(known_N, low, high), _BINS, (low, high))
    edges[0], edges[-1] = min(edges[0], known_N.min()), max(edges[-1], known_N.max())
    return {"edges": [float(f"{edge:.6g}") for edge in edges], "counts": counts.tolist()}
