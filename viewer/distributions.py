"""How the policy's numbers spread over the tokens of each step: of all tokens by footers, of some by their lists."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from viewer.files import RunDir
from viewer.step_files import Float64s, read_drawn
from viewer.summaries import QUANTILES, StepFiles, by_position, histogram, limits_of, mapping

MAX_STEPS = 300
_BINS, _TAIL = 48, 0.001
_OF_ALL = {"kl": "log_ratio_ref", "mismatch": "log_ratio_rollout"}
_HISTOGRAMS = (*_OF_ALL, "entropy", "ratio")


class Distributions:
    """The histograms of a run's steps."""

    def __init__(self, folder: RunDir) -> None:
        self._folder, self._files = folder, StepFiles(folder, _read)

    def since(self, since: int = -1, most: int = MAX_STEPS) -> dict[str, Any]:
        """Returns {"steps", "columns", "limits"}: at most 300 recorded steps, what the first `most` after `since` have,
        and percentiles 1 and 99 over all steps up to these.

        Every 2^n-th step is there, so that a page which has the columns up to `since` needs no others of before.
        """
        steps, stride = self._folder.steps("train"), 1
        while len(steps) > MAX_STEPS * stride:
            stride *= 2
        steps = steps[::stride]
        last = max([step for step in steps if step > since][:most], default=since)
        columns = [{**self._files.get(step), "step": step} for step in steps if step <= last]
        limits = {name: limits_of([one.get(name) for one in columns]) for name in _HISTOGRAMS}
        return {"steps": steps, "columns": [one for one in columns if one["step"] > since], "limits": limits}


def _read(folder: RunDir, step: int) -> dict[str, Any]:
    """Reads a step's histograms and means by position; what it has not recorded is left out."""
    footer, drawn = read_drawn(folder, step)
    found = {name: histogram(mapping(footer, "histograms"), key) for name, key in _OF_ALL.items()}
    if {"new", "old"} <= drawn.keys():
        found["ratio"] = _counted(np.exp(np.clip(drawn["new"] - drawn["old"], -80.0, 80.0)))
    if "entropy_tokens" in drawn:
        found["entropy"] = _counted(drawn["entropy_tokens"])
    places = {f"{name}_by_position": by_position(footer, name) for name in _OF_ALL}
    return {name: value for name, value in (found | places).items() if value}


def _counted(values_N: Float64s) -> Mapping[str, Any] | None:
    """Counts numbers as the footers do: the first and the last bin reach to the extremes."""
    known_N = values_N[np.isfinite(values_N)]
    if not len(known_N):
        return None
    low, high = np.quantile(known_N, (_TAIL, 1 - _TAIL))
    counts, edges = np.histogram(np.clip(known_N, low, high), _BINS, (low, high))
    edges[0], edges[-1] = min(edges[0], known_N.min()), max(edges[-1], known_N.max())
    rounded_edges, quantiles = (
        [float(f"{one:.6g}") for one in those] for those in (edges, np.quantile(known_N, QUANTILES))
    )
    return {"edges": rounded_edges, "counts": counts.tolist(), "quantiles": quantiles}
