"""Writes the files that have every step of a run once: metrics, the timeline, and rollouts as JSON lines.

A file that cannot be written ends the run: report, summary and trackers are made from these, and a run resumes by them.
"""

from collections.abc import Mapping
from pathlib import Path

from controller.tracking.events import Event, LineComplete, Restored, StepDone, Validated, Worked
from controller.tracking.rollout_dump import rollout_rows
from splitppo.config import Config
from splitppo.run_folder.rollout_lines import cut_back, write_rollouts
from splitppo.run_folder.step_file import METRICS_FILE, StepFile
from splitppo.run_folder.trace import TRACE_FILE, Trace


class StepFiles:
    """The sink of metrics.jsonl, trace.json and rollouts/*/STEP.jsonl; `Restored` opens the files."""

    def __init__(self, config: Config, run_dir: Path) -> None:
        self._config = config
        self._run_dir = run_dir
        self._restored_metrics: Mapping[str, float] = {}

    def receive(self, event: Event) -> None:
        """Writes what belongs into these files."""
        match event:
            case Restored():
                self._open(event)
            case Worked():
                self._trace.add(event.spans)
            case StepDone():
                self._write_step(event)
            case Validated():
                self._write_validation(event)
            case LineComplete():
                self._metrics.write(event.step, event.metrics)

    def _open(self, event: Restored) -> None:
        """Opens the files, and removes what they have of steps after the restored one.

        A run that only validates writes the line of its step anew, with the validation.
        """
        validates_only = self._config.evaluation.val_only
        last_line = event.last_kept - 1 if validates_only and event.step else event.last_kept
        self._restored_metrics = event.metrics or {}
        self._metrics = StepFile(self._run_dir / METRICS_FILE, last_line)
        self._trace = Trace(self._run_dir / TRACE_FILE, event.timeline)
        cut_back(self._run_dir / "rollouts", event.last_kept)
        if event.metrics is not None and self._metrics.last_step < event.step and not validates_only:
            self._metrics.write(event.step, event.metrics)

    def _write_step(self, event: StepDone) -> None:
        """Writes the spans of a step before its line, so that who reads the line finds them."""
        record = event.record
        self._trace.add(record.spans)
        if self._config.tracking.dump_rollouts:
            write_rollouts(self._run_dir / "rollouts" / "train", record.step, rollout_rows(record.scores))

    def _write_validation(self, event: Validated) -> None:
        """Writes the responses of a validation, if they are dumped, and the line of one that belongs to no step."""
        validation = event.validation
        if self._config.evaluation.dump_generations:
            write_rollouts(self._run_dir / "rollouts" / event.split, event.step, rollout_rows(validation.scores))
        if event.line is not None:
            self._metrics.write(event.step, {**self._restored_metrics, **event.line})
            self._trace.add(validation.spans)
