"""How the policy's numbers spread over the tokens of each step: of all tokens by footers, of some by their lists."""

from typing import Any

import numpy as np

from splitppo.run_folder.files import RunDir
from splitppo.run_folder.histogram import histogram
from splitppo.run_folder.rollouts import read_drawn
from viewer.summaries import StepFiles, by_position, limits_of, mapping, recorded_histogram

MAX_STEPS = 300
_OF_ALL = {"kl": "log_ratio_ref", "mismatch": "log_ratio_rollout"}
_HISTOGRAMS = (*_OF_ALL, "entropy", "ratio")


class Distributions:
    """The histograms of a run's steps."""

    def __init__(self, folder: RunDir) -> None:
        self._folder = folder
        self._files = StepFiles(folder, _read)

    def since(self, since: int = -1, most: int = MAX_STEPS) -> dict[str, Any]:
        """Returns {"steps", "columns", "limits"}: at most 300 recorded steps, what the first `most` after `since` have,
        and percentiles 1 and 99 over all steps up to these.

        Every 2^n-th step is there, so that a page which has the columns up to `since` needs no others of before.
        """
        steps = self._folder.steps("train")
        stride = 1
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
    found = {name: recorded_histogram(mapping(footer, "histograms"), key) for name, key in _OF_ALL.items()}
    if {"new", "old"} <= drawn.keys():
        found["ratio"] = histogram(np.exp(np.clip(drawn["new"] - drawn["old"], -80.0, 80.0)))
    if "entropy_tokens" in drawn:
        found["entropy"] = histogram(drawn["entropy_tokens"])
    places = {f"{name}_by_position": by_position(footer, name) for name in _OF_ALL}
    return {name: value for name, value in (found | places).items() if value}
