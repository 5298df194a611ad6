"""Collects spans, timings and metrics of each step of a run, and writes each step's line of metrics.jsonl once."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from pathlib import Path
from typing import Any

from controller.conversations.conversation import waited_for
from controller.ppo.scores import Scores
from controller.tracking.display import Display
from controller.tracking.record.run_record import RunRecord
from controller.tracking.rollout_dump import cut_back, rollout_rows, sample_rows, write_rollouts
from controller.tracking.step_record import StepRecord, metrics_line
from controller.validation.result import ValidationResult
from controller.workers.clients import Traffic, WorkerClient
from splitppo.clock import unix_s
from splitppo.config import Config
from splitppo.run_folder.spans import Span
from splitppo.run_folder.step_file import METRICS_FILE, SAMPLES_FILE, StepFile
from splitppo.run_folder.trace import Trace

log = logging.getLogger(__name__)


class Recorder:
    """Records the steps of a run in files and on the display. Two steps may be open at a time (schedule `overlap`)."""

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        display: Display,
        on_line: Callable[[], None] = lambda: None,
        *,
        record: RunRecord | None = None,
    ) -> None:
        """Makes a recorder that calls `on_line` whenever metrics.jsonl was opened or has another line."""
        self._record = record or RunRecord(config, run_dir)  # without `start` it records nothing
        self._config = config
        self._run_dir = run_dir
        self._display = display
        self._on_line = on_line
        self._rollouts = run_dir / "rollouts"
        self._clients: Sequence[WorkerClient] = ()
        self._open: deque[StepRecord] = deque()
        self._unpublished: deque[tuple[int, Mapping[str, float], float]] = deque()  # and when it was complete
        self._held: dict[int, tuple[asyncio.Future[Mapping[str, float]], float]] = {}  # and since when
        self._previous_spans: Sequence[Span] = ()
        self._num_starts = 0
        self._num_repeated_steps = 0
        self._restored_metrics: Mapping[str, float] = {}
        self.last_step = 0

    def restart_at(
        self,
        step: int,
        clients: Sequence[WorkerClient],
        metrics: Mapping[str, float] | None,
        spans: Sequence[Span] = (),
    ) -> None:
        """Opens the run's files and removes the steps after the restored `step` (0: all steps); drops open steps.

        The traffic of `clients` is counted. `spans` are those of the restore. `metrics` are those of the restored step
        in its checkpoint; they are written if the run was killed before it had written their line.
        """
        self._num_starts += 1
        num_repeated = max(self.last_step - step, 0)
        self._num_repeated_steps += num_repeated
        open_spans = [span for record in self._open for span in record.spans]
        self._open.clear()
        self._unpublished.clear()
        self._held.clear()
        self._previous_spans = ()
        self._clients = clients
        restored_step = step or -1
        validates_only = self._config.evaluation.val_only  # the line of the step is written anew, with the validation
        kept_step = restored_step - 1 if validates_only and step else restored_step
        self._restored_metrics = metrics or {}
        self._samples = StepFile(self._run_dir / SAMPLES_FILE, kept_step)
        self._metrics = StepFile(self._run_dir / METRICS_FILE, kept_step)
        self._trace = Trace(self._run_dir / "trace.json", restored_step=restored_step)
        self._trace.add(spans)
        cut_back(self._rollouts, restored_step)
        cut_spans = [*self._trace.cut, *open_spans]
        self._record.restart_at(step, restored_step, cut_spans, num_repeated=num_repeated)
        if metrics is not None and self._metrics.last_step < step and not validates_only:
            self._log(step, metrics)
        self.last_step = step
        self._on_line()

    def count_restart(self) -> None:
        """Counts the restart of a group after which no step is done again."""
        self._num_starts += 1

    def begin(self, step: int, *, epoch: int = 0) -> StepRecord:
        """Opens the record of a step and returns it; `epoch` is the step's data epoch, from 0."""
        record = StepRecord(step, unix_s(), epoch=epoch, traffic=self._traffic())
        self._open.append(record)
        self._record.live.set(step=step)
        return record

    @property
    def current(self) -> StepRecord:
        """The record of the step that was begun last."""
        return self._open[-1]

    def timed(self, name: str) -> AbstractContextManager[None]:
        """Measures the time of a `with` block for the step that was begun last, unless it is complete."""
        return self.current.timed(name) if self._open else nullcontext()

    def hold(self, step: int) -> asyncio.Future[Mapping[str, float]]:
        """Delays the step's line and later ones in metrics.jsonl until `release`; the future gets the step's metrics.

        So the line of a step with a checkpoint is written after the checkpoint. `step` must not be complete yet.
        """
        self._held[step] = asyncio.get_running_loop().create_future(), unix_s()
        return self._held[step][0]

    def release(self, step: int) -> None:
        """Writes the line of a step that `hold` has delayed, and later lines, into metrics.jsonl."""
        if step in self._held:
            _, begun_s = self._held.pop(step)
            self._record.event("checkpoint", step=step, seconds=unix_s() - begun_s)
        self._publish()

    def release_all(self) -> None:
        """Writes the lines of metrics.jsonl that still wait for a checkpoint, at the end of a run."""
        self._held.clear()
        self._publish()

    def add_spans(self, spans: Sequence[Span]) -> None:
        """Adds spans that belong to no open step to the timeline file."""
        self._trace.add(spans)

    def close(self, record: StepRecord) -> None:
        """Closes a step's record: stores the time at which its own work ended, and the bytes that were moved for it."""
        record.ended_s = unix_s()
        record.traffic = self._traffic() - record.traffic

    def add_validation(self, step: int, validation: ValidationResult, *, split: str = "val") -> None:
        """Adds a validation's metrics and spans to its step's record; that of step 0 gets a line of its own.

        `split` is the name of the folder of its rollouts.
        """
        self._display.validation(step, validation.accuracy)
        self._record.validation(step, validation, split)
        if self._config.evaluation.dump_generations:
            write_rollouts(self._rollouts / split, step, rollout_rows(validation.scores))
        if self._open:
            self.current.validation = validation
            self.current.add_work_of(validation)
        elif step == 0 or self._config.evaluation.val_only:
            timings = {f"timing_s/{name}": seconds for name, seconds in validation.timings_s.items()}
            self._write_samples(step, validation, [])
            self._log(step, {**self._restored_metrics, **validation.metrics, **timings})
            self.add_spans(validation.spans)

    def complete_oldest(self) -> None:
        """Completes the oldest open step, whose updates have ended: writes its spans, samples and metrics."""
        record = self._open.popleft()
        self._trace.add(record.spans)
        metrics = {
            **metrics_line(record, [*self._previous_spans, *record.spans], self._config),
            "recovery/num_restarts": float(self._num_starts - 1),
            "recovery/num_repeated_steps": float(self._num_repeated_steps),
        }
        tracking = self._config.tracking
        scores = record.scores
        self._previous_spans = record.spans
        is_sampled = tracking.sample_freq > 0 and record.step % tracking.sample_freq == 0
        samples = self._samples_of(scores) if is_sampled else []
        self._write_samples(record.step, record.validation, samples)
        self._unpublished.append((record.step, metrics, unix_s()))
        self._publish()
        self.last_step = record.step
        self._display.samples(record.step, samples)
        if tracking.dump_rollouts:
            write_rollouts(self._rollouts / "train", record.step, rollout_rows(scores))
        self._record.step(record, metrics)
        if record.step in self._held:
            self._held[record.step][0].set_result(metrics)

    def _publish(self) -> None:
        """Writes all finished lines before the delayed one to metrics.jsonl, and shows them on the display."""
        while self._unpublished and self._unpublished[0][0] not in self._held:
            step, metrics, completed_s = self._unpublished.popleft()
            self._log(step, metrics)
            self._display.step(step, metrics, completed_s)
            if waited := waited_for(metrics):
                log.info("step %d waited %s", step, waited)

    def _log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._metrics.write(step, metrics)
        self._on_line()

    def _samples_of(self, scores: Scores) -> list[dict[str, Any]]:
        """Returns the first `tracking.num_samples` responses of a step as rows with texts and score."""
        return list(islice(sample_rows(scores), self._config.tracking.num_samples))

    def _write_samples(
        self, step: int, validation: ValidationResult | None, trained: Sequence[Mapping[str, Any]]
    ) -> None:
        """Writes samples of a step before its metrics, so that a reader of the metrics finds the samples."""
        validated = self._samples_of(validation.scores) if validation and self._config.tracking.sample_freq > 0 else []
        rows = [{"split": "train", **sample} for sample in trained] + [{"split": "val", **row} for row in validated]
        if rows:
            self._samples.write(step, {"samples": rows})

    def _traffic(self) -> Traffic:
        return sum((client.traffic for client in self._clients), Traffic())
