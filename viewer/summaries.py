"""Summaries over the recorded steps of a run: curves of the critic and of lengths, and the scales of colours."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from splitppo.run_folder.files import RunDir, Unreadable, finite
from splitppo.run_folder.histogram import QUANTILES
from splitppo.run_folder.rollouts import read_footer

MAX_FOOTERS = 20_000
MAX_BINS = 100
_SCALED_STEPS = 40
_ENOUGH_STEPS = 8
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
_TAIL = 0.01


class StepFiles:
    """The train files of a run, each read once by `read` as long as it stays the same."""

    def __init__(self, folder: RunDir, read: Callable[[RunDir, int], dict[str, Any]]) -> None:
        self._folder = folder
        self._read = read
        self._known: dict[int, tuple[tuple[int, int, int] | None, dict[str, Any]]] = {}

    def get(self, step: int) -> dict[str, Any]:
        """Returns what was read of a step, only "error" if its file cannot be read."""
        stamp = self._folder.stamp("rollouts", "train", f"{step}.parquet")
        if stamp is None or self._known.get(step, (None,))[0] != stamp:
            try:
                self._known[step] = stamp, self._read(self._folder, step)
            except Unreadable as error:
                return {"error": str(error)}
        return self._known[step][1]


class Footers:
    """The footers of a run's train files."""

    def __init__(self, folder: RunDir) -> None:
        self._folder = folder
        self._scales: dict[str, tuple[float, float]] | None = None
        # Of a step, the small values, with "error" among them if the file cannot be read.
        self.get = StepFiles(folder, _small_footer).get
        self._whole = StepFiles(folder, read_footer).get

    def curves(self, since: int = -1) -> dict[str, Any]:
        """Returns what the steps after `since` say about the critic and about lengths, as columns over the steps."""
        steps = [step for step in self._folder.steps("train")[-MAX_FOOTERS:] if step > since]
        footers = [self.get(step) for step in steps]
        explained, lengths = ([mapping(one, key) for one in footers] for key in ("explained_variance", "lengths"))
        return {
            "steps": steps,
            **{name: [finite(found.get(name)) for found in explained] for name in ("value", "low", "high")},
            **{name: [finite(found.get(name)) for found in lengths] for name in ("p10", "p50", "p90")},
            "auc": [finite(footer.get("auc_first_value")) for footer in footers],
            "by_position": [by_position(footer, "ev") for footer in footers],
            "errors": [footer["error"] for footer in footers if "error" in footer][:5],
        }

    def scales(self) -> Mapping[str, tuple[float, float]]:
        """Returns the limits of each colour: percentiles 1 and 99 over steps of the whole run, then the same for good.

        Once there are enough steps they decide, so that a colour means one number for as long as the server runs.
        """
        if self._scales is None:
            steps = self._folder.steps("train")
            told = [mapping(self._whole(step), "histograms") for step in steps[:: max(1, len(steps) // _SCALED_STEPS)]]
            found = {
                name: limits_of([recorded_histogram(one, key) for one in told for key in keys])
                for name, keys in _HISTOGRAMS.items()
            }
            scales = {name: limits for name, limits in found.items() if limits} | _CONSTANT
            if "mismatch" in scales:
                scales["mismatch"] = (0.0, max(map(abs, scales["mismatch"])))
            if len(steps) < _ENOUGH_STEPS:
                return scales
            self._scales = scales
        return self._scales


def _small_footer(folder: RunDir, step: int) -> dict[str, Any]:
    footer = read_footer(folder, step)
    return {name: value for name, value in footer.items() if name not in ("histograms", "calibration")}


def limits_of(histograms: Sequence[Mapping[str, Any] | None]) -> tuple[float, float] | None:
    """Returns percentiles 1 and 99 of all histograms together, those that are None left out; None if all are."""
    there = [one for one in histograms if one]
    if not there:
        return None
    known = [(one["edges"], one["edges"][1:], one["counts"]) for one in there]
    # [bins of all histograms, 3]: lower edge, upper edge, count; sorted by lower edges, empty bins left out.
    table = np.array(sorted(row for lists in known for row in zip(*lists, strict=False) if row[2] > 0), np.float64)
    counted = np.cumsum(table[:, 2])
    places = np.searchsorted(counted, [counted[-1] * _TAIL, counted[-1] * (1 - _TAIL)])
    # The outermost bins reach to the extremes; percentiles of all lie between the percentiles of each.
    low = max(float(table[places[0], 0]), min(one["quantiles"][0] for one in there))
    high = min(float(table[places[1], 1]), max(one["quantiles"][-1] for one in there))
    return (low, high) if high > low else (low - 0.5, low + 0.5)


def recorded_histogram(histograms: Mapping[str, Any], name: str) -> Mapping[str, Any] | None:
    """Returns a histogram of a footer with its quantiles, by its bins if it has none; None if it is no histogram."""
    found = mapping(histograms, name)
    try:
        edges, counts = (np.array(found.get(key), np.float64) for key in ("edges", "counts"))
    except (TypeError, ValueError, OverflowError):
        return None
    fits = counts.ndim == 1 and edges.shape == (len(counts) + 1,) and 0 < len(counts) <= MAX_BINS
    is_known = fits and np.isfinite([*edges, *counts]).all() and (np.diff(edges) >= 0).all()
    if not is_known or counts.min() < 0 or not counts.sum():
        return None
    # The outermost bins reach to the extremes: what lies in them is taken for their inner edge.
    inner = np.clip(edges, *edges[[1, -2]]) if len(counts) > 2 else edges
    quantiles = numbers_of(found, "quantiles")
    if len(quantiles) != len(QUANTILES) or None in quantiles:
        quantiles = np.interp(QUANTILES, np.cumsum([0, *counts]) / counts.sum(), inner).tolist()
    return {"edges": edges.tolist(), "counts": counts.tolist(), "quantiles": quantiles}


def by_position(footer: Mapping[str, Any], name: str) -> list[float | None]:
    """Returns a list of a footer by position; None for a part with less than a quarter of its share of the tokens."""
    found = mapping(footer, "by_position")
    numbers, counts = (numbers_of(found, key) for key in (name, "count"))
    least = sum(count or 0 for count in counts) / max(1, len(counts)) / 4
    return [number if (count or 0) >= least else None for number, count in zip(numbers, counts, strict=False)]


def mapping(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Returns a value that is an object, an empty one for anything else."""
    found = values.get(name)
    return found if isinstance(found, dict) else {}


def numbers_of(values: Mapping[str, Any], name: str) -> list[float | None]:
    """Returns a value that is a list of numbers, with None for what is no number; an empty one for anything else."""
    found = values.get(name)
    return [*map(finite, found)] if isinstance(found, list) else []
