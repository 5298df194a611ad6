"""The metrics of a run as columns, kept up to date from metrics.jsonl while the run writes it."""

import math
import secrets

import numpy as np
import numpy.typing as npt

from viewer.files import RunDir, Tail, finite

Float32s = npt.NDArray[np.float32]
MAX_METRICS, MAX_NAME, MAX_STEP = 4_000, 200, 2**31 - 1


class Metrics:
    """The columns of metrics.jsonl. A name keeps its number for as long as the server runs.

    Attributes:
        steps: the steps that have a line, in order.
        generation: another number whenever the file was replaced, which a recovery does, or the server started anew.
    """

    def __init__(self, folder: RunDir) -> None:
        self.steps: list[int] = []
        self.generation = secrets.randbelow(1 << 30)
        self._columns: dict[str, dict[int, float]] = {}
        self._tail = Tail(folder, "metrics.jsonl")

    @property
    def names(self) -> list[str]:
        """The metrics, by number."""
        return [*self._columns]

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
            for column in self._columns.values():
                column.clear()
        for row in rows:
            step = row.pop("step", None)
            if not isinstance(step, int) or not (self.steps or [-1])[-1] < step <= MAX_STEP:
                continue
            self.steps.append(step)
            for name, value in row.items():
                has_room = len(name) <= MAX_NAME and (name in self._columns or len(self._columns) < MAX_METRICS)
                if has_room and (known := finite(value)) is not None:
                    self._columns.setdefault(name, {})[step] = known

    def column(self, number: int, since: int) -> Float32s:
        """Returns the values of a metric at all steps after `since`; NaN where a step has none."""
        values = self._columns[self.names[number]]
        return np.array([values.get(step, math.nan) for step in self.steps if step > since], np.float32)

    def recent(self, name: str, num: int = 1) -> list[float]:
        """Returns the last `num` values of a metric."""
        return list(self._columns.get(name, {}).values())[-num:]
