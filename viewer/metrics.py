"""The metrics of a run as columns, kept up to date from metrics.jsonl while the run writes it."""

import secrets
from array import array
from bisect import bisect
from collections.abc import Sequence
from itertools import compress, islice
from typing import Any

import numpy as np
import numpy.typing as npt

from splitppo.run_folder.files import RunDir, finite, follower
from splitppo.run_folder.step_file import METRICS_FILE

Float32s = npt.NDArray[np.float32]
Float64s = npt.NDArray[np.float64]
Int64s = npt.NDArray[np.int64]
MAX_METRICS = 4_000
MAX_NAME = 200
MAX_STEP = 2**31 - 1


class Metrics:
    """The columns of metrics.jsonl. A name keeps its number for as long as the server runs.

    Attributes:
        steps: the steps that have a line, in order.
        generation: another number whenever the file was replaced, which a recovery does, or the server started anew.
    """

    def __init__(self, folder: RunDir) -> None:
        self.steps: list[int] = []
        self.generation = secrets.randbelow(1 << 30)
        self._numbers: dict[str, int] = {}
        self._rows: list[tuple[Int64s, Float64s]] = []
        self._places: dict[tuple[str, ...], Int64s] = {}  # of lines with the same metrics, which share them
        self._log = follower(folder, METRICS_FILE)

    @property
    def names(self) -> list[str]:
        """The metrics, by number."""
        return [*self._numbers]

    @property
    def lines_broken(self) -> int:
        """Lines that could not be read, and are left out."""
        return self._log.num_broken

    def refresh(self) -> None:
        """Reads what is new."""
        is_new, rows = self._log.read()
        if is_new:
            self.generation += 1
            self.steps.clear()
            self._rows.clear()
        for row in rows:
            step = row.pop("step", None)
            if isinstance(step, int) and (self.steps or [-1])[-1] < step <= MAX_STEP:
                self.steps.append(step)
                self._rows.append(self._row(row))

    def _row(self, values: dict[str, Any]) -> tuple[Int64s, Float64s]:
        """Returns the numbers of the metrics that a line has, and their values."""
        try:
            numbers = np.array(array("d", values.values()))
        except (TypeError, OverflowError):  # one of them is no number
            numbers = np.array([finite(value) for value in values.values()], np.float64)
        is_known = np.isfinite(numbers)
        names = tuple(compress(values, is_known))
        if names not in self._places:
            self._places[names] = np.array([self._number(name) for name in names], np.int64)
        return self._places[names], numbers[is_known]

    def _number(self, name: str) -> int:
        """Returns the number of a metric; -1 for one too many."""
        has_room = len(name) <= MAX_NAME and len(self._numbers) < MAX_METRICS
        return self._numbers.setdefault(name, len(self._numbers)) if has_room else self._numbers.get(name, -1)

    def columns(self, numbers: Sequence[int], since: int) -> list[Float32s]:
        """Returns the values of metrics at all steps after `since`; NaN where a step has none."""
        rows = self._rows[bisect(self.steps, since) :]
        asked = np.array(numbers, np.int64)
        table = np.empty((len(rows), len(asked)), np.float32)
        line = np.empty(len(self._numbers) + 1)
        with np.errstate(over="ignore"):  # what is more than a float32 holds is infinite
            for row, (places, values) in zip(table, rows, strict=True):
                line.fill(np.nan)
                line[places] = values
                row[:] = line[asked]
        return [*table.T]

    def recent(self, name: str, num: int = 1) -> list[float]:
        """Returns the last `num` values of a metric."""
        number = self._numbers.get(name, MAX_METRICS)
        found = (float(values[places == number][0]) for places, values in reversed(self._rows) if number in places)
        return [*islice(found, num)][::-1]
