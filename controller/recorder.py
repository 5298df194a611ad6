"""What a step leaves on record: spans for the timeline, timings, metrics; one metrics line per step, written once."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean

from controller.clients import Traffic, WorkerClient
from controller.display import Display
from controller.evaluation import ValidationResult
from controller.step_record import StepRecord, metrics_line
from controller.summary import Overlap
from controller.trace import Span, Trace
from controller.trackers import METRICS_FILE, RolloutDump, Tracker, open_trackers, read_metrics
from splitppo.config import Config


class Recorder:
    """Writes down what happens: trackers, trace, display, rollouts. At most two steps are open (schedule `overlap`)."""

    def __init__(self, config: Config, run_dir: Path, display: Display, epoch_of: Callable[[int], int]) -> None:
        self._config = config
        self._epoch_of = epoch_of
        self._run_dir = run_dir
        self._display = display
        self._trackers: list[Tracker] = []
        self._trace: Trace | None = None
        self._dump = RolloutDump(run_dir / "rollouts")
        self._open: deque[StepRecord] = deque()
        self._completions: dict[int, asyncio.Future[Mapping[str, float]]] = {}
        self._unpublished: deque[tuple[int, Mapping[str, float]]] = deque()
        self._held_step = -1
        self._clients: Sequence[WorkerClient] = ()
        self._overlaps: dict[int, Overlap] = {}
        self._num_starts = 0
        self._num_repeated_steps = 0
        self.last_step = 0

    def restart_at(
        self,
        step: int,
        clients: Sequence[WorkerClient],
        metrics: Mapping[str, float] | None,
        spans: Sequence[Span] = (),
    ) -> None:
        """Cuts every record back to a restored step; what was open is dropped.

        Args:
            step: restored; 0 starts afresh.
            clients: whose traffic is counted.
            metrics: of that step, from its checkpoint: written if the run was killed before their line was.
            spans: of the restore.
        """
        self._num_starts += 1
        self._num_repeated_steps += max(self.last_step - step, 0)
        self._open.clear()
        self._completions.clear()
        self._unpublished.clear()
        self._held_step = -1
        self._clients = clients
        self.close_files()
        restored_step = step if step > 0 else None
        self._trackers = open_trackers(self._run_dir, self._config.tracking.trackers, restored_step=restored_step)
        self._trace = Trace(self._run_dir / "trace.json", restored_step=restored_step)
        self._trace.add(spans)
        self._dump.cut_back(step)
        if metrics is not None and all(row["step"] != step for row in read_metrics(self._run_dir / METRICS_FILE)):
            self._log(step, metrics)
        self._overlaps = {done: overlap for done, overlap in self._overlaps.items() if done <= step}
        self.last_step = step

    def begin(self, step: int) -> StepRecord:
        """Opens the record of a step."""
        self._completions = {known: done for known, done in self._completions.items() if known >= step - 1}
        record = StepRecord(step, time.time(), traffic_before=self._traffic())
        self._open.append(record)
        self._completions[step] = asyncio.get_running_loop().create_future()
        return record

    @property
    def current(self) -> StepRecord:
        """The record of the step that began last."""
        return self._open[-1]

    def hold(self, step: int) -> asyncio.Future[Mapping[str, float]]:
        """Keeps the step's line back until `release`; returns its metrics, which are there when it is complete.

        Whoever sees the line of a step that is checkpointed can rely on the checkpoint. Later lines wait, too.
        """
        self._held_step = step
        return self._completions[step]

    def release(self, step: int) -> None:
        """Writes the line of a held step, and those that came after it."""
        if step == self._held_step:
            self._held_step = -1
        self._publish()

    def add_spans(self, spans: Sequence[Span]) -> None:
        """Takes work that belongs to no open step into the timeline."""
        assert self._trace is not None
        self._trace.add(spans)

    def close(self, record: StepRecord) -> None:
        """Ends the step's own time."""
        record.ended_s = time.time()
        record.traffic = self._traffic() - record.traffic_before

    def add_validation(self, step: int, validation: ValidationResult) -> None:
        """Takes a validation into the step's line and spans; that of step 0 has a line of its own."""
        self._display.validation(step, validation.accuracy)
        if self._config.tracking.dump_rollouts:
            self._dump.write("val", step, (row for verdict in validation.verdicts for row in verdict.as_rows()))
        if self._open:
            self.current.validation = validation
            self.current.spans += validation.spans
            for name, seconds in validation.timings_s.items():
                self.current.add_time(name, seconds)
        elif step == 0:
            timings = {f"timing_s/{name}": seconds for name, seconds in validation.timings_s.items()}
            self._log(0, {**validation.metrics, **timings})
            self.add_spans(validation.spans)

    def complete_oldest(self) -> None:
        """Makes the line and the spans of the step that is open longest; both its updates are done."""
        assert self._trace is not None
        record = self._open.popleft()
        self._trace.add(record.spans)
        spans = [span for span in self._trace.spans if span.step >= record.step - 1]
        metrics = {
            **metrics_line(record, spans, self._config, epoch=self._epoch_of(record.step)),
            "recovery/num_restarts": float(self._num_starts - 1),
            "recovery/num_repeated_steps": float(self._num_repeated_steps),
        }
        self._unpublished.append((record.step, metrics))
        self._publish()
        self.last_step = record.step
        self._show(record)
        if "overlap/efficiency" in metrics:
            self._overlaps[record.step] = Overlap(
                efficiency=metrics["overlap/efficiency"],
                bubble_actor=metrics["overlap/bubble_actor"],
                bubble_critic=metrics["overlap/bubble_critic"],
            )
        self._completions[record.step].set_result(metrics)

    def overlap(self) -> Overlap | None:
        """Mean over the steps of this process in which both roles were updated; None if there was none."""
        if not self._overlaps:
            return None
        overlaps = self._overlaps.values()
        return Overlap(
            efficiency=fmean(overlap.efficiency for overlap in overlaps),
            bubble_actor=fmean(overlap.bubble_actor for overlap in overlaps),
            bubble_critic=fmean(overlap.bubble_critic for overlap in overlaps),
        )

    def _publish(self) -> None:
        """Writes and shows the lines up to the one that is held."""
        while self._unpublished and self._unpublished[0][0] != self._held_step:
            step, metrics = self._unpublished.popleft()
            self._log(step, metrics)
            self._display.step(step, metrics)

    def _log(self, step: int, metrics: Mapping[str, float]) -> None:
        for tracker in self._trackers:
            tracker.log(step, metrics)

    def _show(self, record: StepRecord) -> None:
        """Sample generations every few steps, all rollouts if asked."""
        tracking, verdict = self._config.tracking, record.verdict
        assert verdict is not None
        if tracking.sample_freq > 0 and record.step % tracking.sample_freq == 0:
            self._display.samples(record.step, verdict.shown(range(min(tracking.num_samples, len(verdict.samples)))))
        if tracking.dump_rollouts:
            self._dump.write("train", record.step, verdict.as_rows())

    def _traffic(self) -> Traffic:
        return sum((client.traffic for client in self._clients), Traffic())

    def close_files(self) -> None:
        """Ends the trackers; a line that still waits for its checkpoint is written first."""
        self.release(self._held_step)
        for tracker in self._trackers:
            tracker.close()
        self._trackers = []
