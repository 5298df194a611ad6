"""Keeps the records of the steps of a run while they are open, and tells the sinks of the run what happens in it."""

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from controller.conversations.conversation import waited_for
from controller.tracking.events import (
    CheckpointCommitted,
    Event,
    LineComplete,
    Restored,
    Sink,
    StepBegun,
    StepDone,
    Validated,
    Worked,
)
from controller.tracking.rollout_dump import first_samples
from controller.tracking.step_record import StepRecord, metrics_line
from controller.tracking.waiting_lines import StepMetrics, WaitingLines
from controller.validation.result import ValidationResult
from controller.workers.clients import Traffic, WorkerClient
from splitppo.clock import unix_s
from splitppo.config import Config
from splitppo.run_folder.metrics import check_declared
from splitppo.run_folder.spans import Span
from splitppo.run_folder.trace import TRACE_FILE, read_trace

log = logging.getLogger(__name__)


class Recorder:
    """The one emitter of a run's events. Two steps may be open at a time (schedule `overlap`).

    Attributes:
        last_step: the last step whose updates have ended, or that was restored.
    """

    def __init__(self, config: Config, sinks: Sequence[Sink]) -> None:
        self.last_step = 0
        self._config = config
        self._sinks = sinks
        self._clients: Sequence[WorkerClient] = ()
        self._open: deque[StepRecord] = deque()
        self._lines = WaitingLines()
        self._previous_spans: Sequence[Span] = ()
        self._restarts = _Restarts()

    def emit(self, event: Event) -> None:
        """Tells every sink what has happened; what a sink raises is raised."""
        for sink in self._sinks:
            sink(event)

    def restart_at(
        self,
        step: int,
        clients: Sequence[WorkerClient],
        metrics: Mapping[str, float] | None,
        spans: Sequence[Span] = (),
    ) -> None:
        """Lets the run go on after the restored `step` (0: with the initial models); drops open steps.

        The traffic of `clients` is counted. `spans` are those of the restore. `metrics` are those of the restored step
        in its checkpoint; they are written if the run was killed before it had written their line.
        """
        open_spans = [span for record in self._open for span in record.spans]
        num_repeated = max(self.last_step - step, 0)
        last_kept = -1 if step == 0 else step  # of step 0 nothing is kept: its validation is done again
        timeline = read_trace(self._config.run.dir / TRACE_FILE)
        kept = [span for span in timeline if span.step <= last_kept]
        cut = [span for span in timeline if span.step > last_kept]
        self._open.clear()
        self._lines = WaitingLines()
        self._previous_spans = ()
        self._clients = clients
        self._restarts.count(num_repeated)
        self.emit(Restored(step, last_kept, num_repeated, metrics, [*kept, *spans], [*cut, *open_spans]))
        self.last_step = step

    def count_restart(self) -> None:
        """Counts the restart of a group after which no step is done again."""
        self._restarts.count()

    def begin(self, step: int, *, epoch: int = 0) -> StepRecord:
        """Opens the record of a step and returns it; `epoch` is the step's data epoch, from 0."""
        record = StepRecord(step, unix_s(), epoch=epoch, traffic=self._traffic())
        self._open.append(record)
        self.emit(StepBegun(step))
        return record

    @property
    def current(self) -> StepRecord:
        """The record of the step that was begun last."""
        return self._open[-1]

    def timed(self, name: str) -> AbstractContextManager[None]:
        """Measures the time of a `with` block for the step that was begun last, unless it is complete."""
        return self.current.timed(name) if self._open else nullcontext()

    def close(self, record: StepRecord) -> None:
        """Closes a step's record: stores the time at which its own work ended, and the bytes that were moved for it."""
        record.ended_s = unix_s()
        record.traffic = self._traffic() - record.traffic

    def add_spans(self, spans: Sequence[Span]) -> None:
        """Adds spans that belong to no open step to the timeline."""
        self.emit(Worked(spans))

    def add_validation(self, step: int, validation: ValidationResult, *, split: str = "val") -> None:
        """Adds a validation's metrics and spans to its step's record.

        If no step is open (at step 0, and with `val_only`), its metrics get a line of their own. `split` is the name of
        the folder of its rollouts.
        """
        line: Mapping[str, float] | None = None
        if self._open:
            self.current.validation = validation
            self.current.add_work_of(validation.spans, validation.timings_s)
        elif step == 0 or self._config.evaluation.val_only:
            timings = {f"timing_s/{name}": seconds for name, seconds in validation.timings_s.items()}
            line = {**validation.metrics, **timings}
            check_declared(line)
        self.emit(Validated(step, validation, split, line))

    def complete_oldest(self) -> None:
        """Completes the oldest open step, whose updates have ended: its line is written, unless it is held."""
        record = self._open.popleft()
        metrics = {
            **metrics_line(record, [*self._previous_spans, *record.spans], self._config),
            **self._restarts.metrics(),
        }
        self._previous_spans = record.spans
        samples = first_samples(record.scores, self._config.tracking.num_shown(record.step))
        self.emit(StepDone(record, metrics))
        self._lines.add(LineComplete(record.step, metrics, samples, completed_s=unix_s()))
        self._tell_lines()
        self.last_step = record.step

    def hold(self, step: int) -> StepMetrics:
        """Delays the step's line and later ones until `release`; the future gets the step's metrics.

        So the line of a step with a checkpoint is written after the checkpoint. `step` must not be complete yet.
        """
        return self._lines.hold(step)

    def release(self, step: int) -> None:
        """Writes the line of a step that `hold` has delayed, and later lines, as its checkpoint is complete."""
        held_s = self._lines.release(step)
        if held_s is not None:
            self.emit(CheckpointCommitted(step, held_s))
        self._tell_lines()

    def release_all(self) -> None:
        """Writes the lines that still wait for a checkpoint, at the end of a run."""
        self._lines.release_all()
        self._tell_lines()

    def _tell_lines(self) -> None:
        while (line := self._lines.next()) is not None:
            self.emit(line)
            if waited := waited_for(line.metrics):
                log.info("step %d waited %s", line.step, waited)

    def _traffic(self) -> Traffic:
        return sum((client.traffic for client in self._clients), Traffic())


@dataclass
class _Restarts:
    """Counts how often the run began or went on in this process, and how many complete steps were done again."""

    num_starts: int = 0
    num_repeated_steps: int = 0

    def count(self, num_repeated: int = 0) -> None:
        self.num_starts += 1
        self.num_repeated_steps += num_repeated

    def metrics(self) -> dict[str, float]:
        """Returns recovery/...; the first start is no restart."""
        return {
            "recovery/num_restarts": float(self.num_starts - 1),
            "recovery/num_repeated_steps": float(self.num_repeated_steps),
        }
