"""Summaries over the recorded steps of a run: the critic's curve, and the scales of colours."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from viewer.files import RunDir, Unreadable
from viewer.step_files import read_footer

MAX_FOOTERS = 20_000
_SCALED_STEPS, _ENOUGH_STEPS = 40, 8
# Colours whose numbers are those of a histogram of all tokens; the scales of the others are constants.
_HISTOGRAMS = {
    "value": ("value", "ret"),
    "advantage": ("advantage",),
    "delta": ("advantage",),
    "reward": ("reward",),
    "kl": ("log_ratio_ref",),
    "mismatch": ("log_ratio_rollout",),
}
_CONSTANT = {"ratio": (0.8, 1.2), "entropy": (0.0, 3.0)}
_PERCENTILES = (1.0, 99.0)


class Footers:
    """The footers of a run's train files, each read once as long as its file stays the same."""

    def __init__(self, folder: RunDir) -> None:
        self._folder = folder
        self._known: dict[int, tuple[tuple[int, int, int], dict[str, Any]]] = {}
        self._scales: dict[str, tuple[float, float]] | None = None

    def get(self, step: int) -> dict[str, Any]:
        """Returns the footer of a step, with "error" in it if the file cannot be read."""
        stamp = self._folder.stamp("rollouts", "train", f"{step}.parquet")
        if stamp is not None and self._known.get(step, (None,))[0] == stamp:
            return self._known[step][1]
        try:
            footer = read_footer(self._folder, step)
        except Unreadable as error:
            return {"error": str(error)}
        if stamp is not None:
            self._known[step] = stamp, footer
        return footer

    def critic(self, since: int = -1) -> dict[str, Any]:
        """Returns what the steps after `since` say about the critic, as columns over the steps."""
        steps = [step for step in self._folder.steps("train")[-MAX_FOOTERS:] if step > since]
        footers = [self.get(step) for step in steps]
        explained = [_mapping(footer, "explained_variance") for footer in footers]
        return {
            "steps": steps,
            **{name: [_number(found, name) for found in explained] for name in ("value", "low", "high")},
            "auc": [_number(footer, "auc_first_value") for footer in footers],
            "by_position": [_rounded(_mapping(footer, "by_position").get("ev")) for footer in footers],
            "errors": [footer["error"] for footer in footers if "error" in footer][:5],
        }

    def scales(self) -> Mapping[str, tuple[float, float]]:
        """Returns the limits of each colour: percentiles 1 and 99 over steps of the whole run, then the same for good.

        Once there are enough steps they decide, so that a colour means one number for as long as the server runs.
        """
        if self._scales is None:
            steps = self._folder.steps("train")
            chosen = steps[:: max(1, len(steps) // _SCALED_STEPS)]
            histograms = [_mapping(self.get(step), "histograms") for step in chosen]
            found = {name: _limits(histograms, sources) for name, sources in _HISTOGRAMS.items()}
            scales = {name: limits for name, limits in found.items() if limits} | _CONSTANT
            if "mismatch" in scales:
                scales["mismatch"] = (0.0, max(map(abs, scales["mismatch"])))
            if len(steps) < _ENOUGH_STEPS:
                return scales
            self._scales = scales
        return self._scales


def _limits(histograms: Sequence[Mapping[str, Any]], names: Sequence[str]) -> tuple[float, float] | None:
    lows: list[float] = []
    highs: list[float] = []
    counts: list[float] = []
    for histogram in (_mapping(found, name) for found in histograms for name in names):
        edges, numbers = histogram.get("edges") or [], histogram.get("counts") or []
        if len(edges) == len(numbers) + 1 and all(isinstance(x, int | float) for x in (*edges, *numbers)):
            lows += edges[:-1]
            highs += edges[1:]
            counts += numbers
    weights = np.array(counts, np.float64)
    if weights.sum() <= 0:
        return None
    low, high = (
        float(np.array(edge)[order][np.searchsorted(np.cumsum(weights[order]), weights.sum() * percent / 100)])
        for edge, percent in ((lows, _PERCENTILES[0]), (highs, _PERCENTILES[1]))
        for order in (np.argsort(edge, kind="stable"),)
    )
    return (low, high) if high > low else (low - 0.5, low + 0.5)


def _mapping(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = values.get(name)
    return found if isinstance(found, dict) else {}


def _number(values: Mapping[str, Any], name: str) -> float | None:
    found = values.get(name)
    return float(found) if isinstance(found, int | float) and np.isfinite(found) else None


def _rounded(values: Any) -> list[float | None]:
    found = values if isinstance(values, list) else []
    return [round(value, 3) if isinstance(value, int | float) and np.isfinite(value) else None for value in found]
