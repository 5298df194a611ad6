"""Ends a run: writes its last sentence, summary.json and report.png, and decides the exit status of the process."""

import logging
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from controller.run.checkpoint_writer import CheckpointFailed
from controller.run.folder import RunFolder
from controller.run.state import RunState
from controller.tracking.display import Display
from controller.tracking.plots import write_report
from controller.tracking.recorder import Recorder
from controller.trainer import Trainer
from controller.workers.local_group import GroupFailed
from splitppo.config import ConfigError
from splitppo.logs import FILE_ONLY
from splitppo.machine.children.ending import exit_status_of
from splitppo.rpc.errors import StorageFailed
from splitppo.run_folder.step_file import METRICS_FILE, read_metrics
from splitppo.run_folder.summary import Accuracy, ExitReason, Overlap, Summary, ThisStart, Validation, WeightsDigests

log = logging.getLogger(__name__)

EXIT_STATUS: dict[ExitReason, int] = {"completed": 0, "failed": 1, "bad_input": 2}


class RunOutcome:
    """Decides how a run ends: the reason and the exit status; writes the files summary.json and report.png.

    Attributes:
        reason: why the run ends, e.g. "completed"; "failed" until another reason is known.
        why: the sentence by which the run fails; None as long as it does not.
        signal: the first signal that asked the run to end.
        resumed_at_step: the step from which this process went on first, before any recovery.
        digests: sha256 of the weights at the end of the run.
        summary: the content of summary.json; None until `finish` has made it.
    """

    def __init__(self, folder: RunFolder, display: Display) -> None:
        self.reason: ExitReason = "failed"
        self.why: str | None = None
        self.signal: signal.Signals | None = None
        self.resumed_at_step = 0
        self.digests = WeightsDigests()
        self.summary: Summary | None = None
        self._folder = folder
        self._display = display
        self._storage_has_failed = False
        self._started_s = time.monotonic()

    def fail(self, error: Exception) -> None:
        """Records an error that ends the run, which sets reason and exit status; prints one sentence for the user."""
        if isinstance(error, ConfigError) or (isinstance(error, GroupFailed) and error.is_bad_input):
            self.reason = "bad_input"
        else:
            # A user who stops the controller may stop the groups as well, before the step is done.
            self.reason = "failed" if self.signal is None or isinstance(error, GroupFailed) else "interrupted"
        self._explain(error)

    def finish(
        self, trainer: Trainer | None, recorder: Recorder, restored: RunState, *, with_report: bool = True
    ) -> None:
        """Shows the result of a run, and writes summary.json and report.png, once.

        If the summary cannot be written, the run has failed. `restored` is the state from which the run went on.
        `trainer` is None if no step was begun.
        """
        config = self._folder.config
        folder = self._folder.path
        if trainer is None and self.reason == "bad_input":  # a refused start changes nothing
            self.summary = Summary.read(folder / "summary.json")
        if self.summary is not None:
            return
        state = trainer.state if trainer else restored
        last_step = recorder.last_step if trainer else state.step
        lines: list[dict[str, Any]] = []
        with self._failing():  # for instance on a full disk, or with a file that somebody has broken
            recorder.release_all()
            lines = [row for row in read_metrics(folder / METRICS_FILE) if row["step"] <= last_step]
        has_stagnated = state.has_stagnated(config)
        has_ended = trainer is not None and (trainer.has_ended or has_stagnated)
        after = state.validation_after if state.validated_step > 0 else None
        missed = self._missed_accuracy(after) if self.reason == "completed" else None
        self.summary = Summary(
            global_step=last_step,
            validation=Validation(before=state.validation_before, after=after),
            train_s=state.train_s,
            tokens=state.tokens,
            overlap=Overlap.over(lines),
            this_start=ThisStart(resumed_at_step=self.resumed_at_step, wall_s=time.monotonic() - self._started_s),
            weights_sha256=self.digests,
            exit_reason=self.reason,
            why=self.why or missed,
            finished=self.reason in ("completed", "interrupted") and has_ended,
            stopped_early=has_stagnated,
            best=state.best,
        )
        self.why = self.summary.why
        with self._failing():
            self.summary.write(folder / "summary.json")
        if trainer is not None and with_report and config.tracking.report:
            try:
                write_report(folder, name=config.run.name, schedule=config.run.schedule, train_s=state.train_s)
            except Exception as error:  # noqa: BLE001 - a run that has finished does not fail for want of a picture
                log.warning("report.png could not be drawn: %s", error)
        self._display.finish(self.summary)

    def exit_status(self) -> int:
        """Returns the exit status of the process. A run below `evaluation.min_accuracy` has failed."""
        if self.reason == "interrupted":
            return exit_status_of(-(self.signal or signal.SIGINT))
        after = self.summary.validation.after if self.summary else None
        if self.reason == "completed" and (missed := self._missed_accuracy(after)):
            sys.stderr.write(f"error: {missed}\n")
            return EXIT_STATUS["failed"]
        return EXIT_STATUS[self.reason]

    def _missed_accuracy(self, after: Accuracy | None) -> str | None:
        """Returns the sentence that the last validation is below `evaluation.min_accuracy`; None if it is not."""
        minimum = self._folder.config.evaluation.min_accuracy
        if minimum <= 0.0 or (after is not None and after.overall >= minimum):
            return None
        reached = "nothing was validated" if after is None else f"the final accuracy is {after.overall:.3f}"
        return f"{reached}, expected evaluation.min_accuracy ({minimum:g}) or more"

    @contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ConfigError) as error:
            self.reason = "failed"
            self._explain(error)

    def _explain(self, error: Exception) -> None:
        """Prints and logs one sentence about an error that ends the run.

        The traceback is in the log file of the group that the sentence names. Storage that has failed once fails again
        while the run is closed; therefore only the first such error is printed.
        """
        if isinstance(error, OSError | StorageFailed) and not isinstance(error, CheckpointFailed):
            error.add_note(self._folder.checkpoints.last_good())
        text = sentence(error)
        self.why = self.why or text
        log.error("%s", text, extra=FILE_ONLY)
        self._display.close()
        if not (isinstance(error, OSError) and self._storage_has_failed):
            with suppress(BrokenPipeError):
                sys.stderr.write(f"error: {text}\n")
        self._storage_has_failed |= isinstance(error, OSError)


def sentence(error: Exception) -> str:
    """Joins an exception's message and its notes (`add_note`) into one sentence."""
    return "; ".join([str(error) or type(error).__name__, *getattr(error, "__notes__", ())])
