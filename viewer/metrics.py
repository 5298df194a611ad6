"""The metrics of a run as columns, kept up to date from metrics.jsonl while the run writes it."""

import math
import secrets

import numpy as np
import numpy.typing as npt

from viewer.files import RunDir, Tail, finite

MAX_METRICS, MAX_NAME, MAX_STEP = 4_000, 200, 2**31 - 1


class Metrics:
    """The columns of metrics.jsonl. A name keeps its number for as long as the server runs.

    Attributes:
        names: the metrics, by number.
        steps: the steps that have a line, in order.
        generation: another number whenever the file was replaced, which a recovery does, or the server started anew.
    """

    def __init__(self, folder: RunDir) -> None:
        self.names: list[str] = []
        self.steps: list[int] = []
        self.generation = secrets.randbelow(1 << 30)
        self._numbers: dict[str, int] = {}
        self._columns: list[dict[int, float]] = []
        self._tail = Tail(folder, "metrics.jsonl")

    @property
    def lines_broken(self) -> int:
        """Lines that could not be read, and are left out."""
        return self._tail.lines_broken

    def refresh(self) -> None:
        """Reads what is new."""
        is_new, rows = self._tail.read()
        if is_new:
            self.generation += 1
            self.steps.clear()
            for column in self._columns:
                column.clear()
        for row in rows:
            step = row.pop("step", None)
            if not isinstance(step, int) or not (self.steps or [-1])[-1] < step <= MAX_STEP:
                continue
            self.steps.append(step)
            for name, value in row.items():
                if (known := finite(value)) is not None and (number := self._number(name)) is not None:
                    self._columns[number][step] = known

    def column(self, number: int, since: int = -1) -> npt.NDArray[np.float32]:
        """Returns the values of a metric at all steps after `since`; NaN where a step has none."""
        values = self._columns[number]
        return np.array([values.get(step, math.nan) for step in self.steps if step > since], np.float32)

    def recent(self, name: str, num: int = 1) -> list[float]:
        """Returns the last `num` values of a metric."""
        return list(self._columns[self._numbers[name]].values())[-num:] if name in self._numbers else []

    def _number(self, name: str) -> int | None:
        if name not in self._numbers and len(self.names) < MAX_METRICS and len(name) <= MAX_NAME:
            self._numbers[name] = len(self.names)
            self.names.append(name)
            self._columns.append({})
        return self._numbers.get(name)
