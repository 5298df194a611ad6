"""Keeps the lines of complete steps back, in their order, until the checkpoints of their steps are complete."""

import asyncio
from collections import deque
from collections.abc import Mapping

from controller.tracking.events import LineComplete
from splitppo.clock import unix_s

StepMetrics = asyncio.Future[Mapping[str, float]]


class WaitingLines:
    """The lines of complete steps that wait, for a checkpoint of their step or of one before it."""

    def __init__(self) -> None:
        self._lines: deque[LineComplete] = deque()
        self._held: dict[int, tuple[StepMetrics, float]] = {}  # by step; held since when, in unix seconds

    def hold(self, step: int) -> StepMetrics:
        """Delays the line of a step, which is not complete yet, until `release`; the future gets its metrics."""
        metrics: StepMetrics = asyncio.get_running_loop().create_future()
        self._held[step] = metrics, unix_s()
        return metrics

    def add(self, line: LineComplete) -> None:
        """Adds the line of a step that is complete."""
        self._lines.append(line)
        if line.step in self._held:
            metrics, _ = self._held[line.step]
            metrics.set_result(line.metrics)

    def release(self, step: int) -> float | None:
        """Ends the hold on a step's line, so that `next` may return it.

        Returns for how many seconds the line was held, None if it was not.
        """
        if step not in self._held:
            return None
        _, begun_s = self._held.pop(step)
        return unix_s() - begun_s

    def release_all(self) -> None:
        """Ends the hold on all lines."""
        self._held.clear()

    def next(self) -> LineComplete | None:
        """Takes out the next line that waits for nothing; None if there is none."""
        if not self._lines or self._lines[0].step in self._held:
            return None
        return self._lines.popleft()
