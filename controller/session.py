"""One run of the controller from start to exit: set up, train, recover, and leave a summary on every way out."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import time
from typing import Literal, NoReturn

import uvloop

from controller.checkpointing import CheckpointFailed, CheckpointWriter
from controller.connection import ServiceGroups
from controller.display import open_display
from controller.evaluation import Evaluator
from controller.inputs import Inputs, load_inputs
from controller.launcher import GroupFailed
from controller.logs import FILE_ONLY, log_to
from controller.recorder import Recorder
from controller.recovery import RestartBudget
from controller.report import write_report
from controller.restoring import RestorePoint
from controller.rollout_check import RolloutMismatch
from controller.run_folder import RunFolder
from controller.run_state import RunState
from controller.schedule import unless
from controller.scoring import Scorer
from controller.summary import ExitReason, Summary, Validation, WeightsDigests
from controller.trainer import Observers, Trainer
from rewards.manager import RewardManager
from splitppo import failpoints
from splitppo.config import Config, ConfigError
from splitppo.config.plan import batch_plan
from splitppo.config.threads import crowding, permitted_cores
from splitppo.rpc.errors import WireError
from splitppo.v1 import worker_pb2

log = logging.getLogger(__name__)

EXIT_STATUS: dict[ExitReason, int] = {"completed": 0, "failed": 1, "bad_input": 2}


def run_session(config: Config) -> int:
    """Runs `config` to its end and returns the exit status.

    Raises:
        ConfigError: the run folder cannot be used; nothing was written to it.
    """
    with RunFolder(config) as folder:
        failpoints.arm(config.debug, folder.path, "controller")
        status: int = uvloop.run(Session(folder).run())
        return status


class Session:
    """Owns everything that one controller process opens, and closes it on every exit path."""

    def __init__(self, folder: RunFolder) -> None:
        self._config = config = folder.config
        self._folder = folder
        self._display = open_display()
        log_to(folder.path, self._display)
        self._groups = ServiceGroups(config, folder, self._on_progress)
        self._recorder: Recorder | None = None
        self._trainer: Trainer | None = None
        self._restored = RunState.initial(config)
        self._phase: Literal["preparing", "training", "closing"] = "preparing"
        self._signal: signal.Signals | None = None
        self._reason: ExitReason = "failed"
        self._summary: Summary
        self._digests = WeightsDigests()
        self._storage_has_failed = False
        self._started_s = time.monotonic()

    async def run(self) -> int:
        """Trains; whatever happens, the groups are ended and summary.json is written."""
        task = self._take_signals()
        try:
            await self._train()
            self._reason = "completed" if self._signal is None else "interrupted"
        except asyncio.CancelledError:
            self._reason = "interrupted"
            task.uncancel()
        except ConfigError as error:
            self._reason = "bad_input"
            self._explain(error)
        except GroupFailed as error:
            self._reason = "bad_input" if error.is_bad_input else "failed"
            self._explain(error)
        except RolloutMismatch as error:
            self._explain(error)
        except (WireError, OSError) as error:
            # Whoever stops the controller may stop the groups as well, before the step is done.
            self._reason = "failed" if self._signal is None else "interrupted"
            self._explain(error)
        except Exception:
            log.exception("the run failed")
        finally:
            self._phase = "closing"
            await self._abandon()
            await self._groups.close()
            self._finish()
        return self._exit_status()

    def _take_signals(self) -> asyncio.Task[object]:
        """SIGINT and SIGTERM are the session's from here on; returns the task that runs it."""
        task = asyncio.current_task()
        assert task is not None
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._interrupt, number, task)
        return task

    def _interrupt(self, number: signal.Signals, task: asyncio.Task[object]) -> None:
        """The first signal lets the running step be finished and saved; the second one leaves at once."""
        if self._signal is not None or self._phase == "closing":
            self._leave_at_once()
        self._signal, self._reason = number, "interrupted"
        if self._phase == "training" and self._trainer is not None:
            log.info("%s: finishing step %d, then saving; once more leaves at once", number.name, self._trainer.step)
            self._trainer.stop()
        else:
            task.cancel()

    def _leave_at_once(self) -> NoReturn:
        """Ends the process wherever it is; the groups end with it."""
        try:
            self._groups.kill()
            self._finish(with_report=False)
            self._folder.release()
            logging.shutdown()
        finally:
            os._exit(self._exit_status())

    async def _train(self) -> None:
        config = self._config
        step = self._folder.resume_step()
        self._restored = self._folder.load_state(step)
        inputs = load_inputs(config)
        self._display.start(batch_plan(config), config, step=step)
        if warning := crowding(config, permitted_cores()):
            log.warning("%s", warning)
        self._recorder = Recorder(config, self._folder.path, self._display, inputs.prompts.epoch_of)
        async with RewardManager(config.reward, inputs.data_sources) as manager:
            await self._train_until_done(inputs, Scorer(inputs.tokenizer, manager), step)

    async def _train_until_done(self, inputs: Inputs, scorer: Scorer, step: int) -> None:
        """Trains from `step` on; lost groups are restarted, and both brought to the last common checkpoint."""
        assert self._recorder is not None
        services = self._config.services
        budget = RestartBudget(services.max_restarts, services.restart_backoff_s)
        point = RestorePoint(self._folder, step)
        while True:
            try:
                return await self._train_from(point, inputs, scorer)
            except (WireError, GroupFailed) as error:
                if self._signal is not None or not self._groups.can_recover(error):
                    raise
                pause_s = budget.take(self._recorder.last_step)
                if pause_s is None:
                    spent = f"services.max_restarts ({services.max_restarts})"
                    error.add_note(f"{spent} recoveries without a new step are spent")
                    raise
                log.warning("recovering in %g s: %s", pause_s, error)
                await self._abandon()
                await self._groups.recover(error)
                await asyncio.sleep(pause_s)

    async def _train_from(self, point: RestorePoint, inputs: Inputs, scorer: Scorer) -> None:
        """Connects, restores both roles and the records to one checkpoint, and trains on to the end."""
        config, folder, recorder = self._config, self._folder, self._recorder
        assert recorder is not None
        services = await self._groups.connect()
        restored = await point.restore(self._groups)
        step, clients = restored.step, self._groups.clients
        recorder.restart_at(step, clients, folder.load_metrics(step), restored.spans)
        observers = Observers(
            Evaluator(config, services.actor, inputs.val_prompts, scorer),
            CheckpointWriter(
                folder.checkpoints,
                clients,
                config.checkpoint,
                config.run.schedule,
                on_saved=recorder.add_spans,
                on_commit=recorder.release,
            ),
            recorder,
        )
        self._restored = state = folder.load_state(step)
        self._trainer = Trainer(config, services, inputs.prompts, scorer, observers, state)
        self._phase = "training"
        try:
            await unless(self._groups.watch(), self._trainer.fit())
        finally:
            self._phase = "preparing"
        self._digests = WeightsDigests(**await self._groups.weights_digests())

    def _on_progress(self, role: str, method: str, progress: worker_pb2.Progress) -> None:
        self._display.phase(role, progress.phase or method, progress.done, progress.total)

    async def _abandon(self) -> None:
        """Gives up what still runs in the background; the services run their commands to the end all the same."""
        if self._trainer is not None:
            await self._trainer.abandon()

    def _finish(self, *, with_report: bool = True) -> None:
        """Writes the last lines, summary and report; what cannot be written is said, and the run counts as failed."""
        state = self._trainer.state if self._trainer else self._restored
        wall_s = time.monotonic() - self._started_s
        self._summary = Summary(
            global_step=self._recorder.last_step if self._recorder and self._trainer else state.step,
            validation=Validation(
                before=state.validation_before,
                after=state.validation_after if state.validated_step > 0 else None,
            ),
            wall_s=wall_s,
            train_s=state.train_s,
            tokens=state.tokens,
            overlap=self._recorder.overlap() if self._recorder else None,
            weights_sha256=self._digests,
            exit_reason=self._reason,
        )
        try:
            if self._recorder is not None:
                self._recorder.close_files()
            self._summary.write(self._folder.path / "summary.json")
        except OSError as error:
            self._reason = "failed"
            self._explain(error)
        if self._recorder is not None and with_report:
            self._draw_report(wall_s)
        self._display.finish(self._summary)

    def _draw_report(self, wall_s: float) -> None:
        """A picture that cannot be drawn does not cost a finished run its exit status."""
        run = self._config.run
        try:
            write_report(self._folder.path, name=run.name, schedule=run.schedule, wall_s=wall_s)
        except Exception as error:  # noqa: BLE001 - whatever a drawing library does
            log.warning("report.png could not be drawn: %s", error)

    def _explain(self, error: Exception) -> None:
        """One sentence for the user; where it happened is in the log file of the group that it names.

        Storage that fails once fails again while the run is closed: only the first time is told.
        """
        if isinstance(error, OSError) and not isinstance(error, CheckpointFailed):
            error.add_note(self._folder.checkpoints.last_good())
        sentence = "; ".join([str(error), *getattr(error, "__notes__", ())])
        log.error("%s", sentence, extra=FILE_ONLY)
        self._display.close()
        if not (isinstance(error, OSError) and self._storage_has_failed):
            sys.stderr.write(f"error: {sentence}\n")
        self._storage_has_failed |= isinstance(error, OSError)

    def _exit_status(self) -> int:
        """The process's exit status; a completed run fails if it stays under `evaluation.min_accuracy`."""
        if self._reason == "interrupted":
            return 128 + (self._signal or signal.SIGINT)
        if self._reason != "completed":
            return EXIT_STATUS[self._reason]
        minimum, after = self._config.evaluation.min_accuracy, self._summary.validation.after
        if minimum > 0.0 and (after is None or after.overall < minimum):
            reached = "nothing was validated" if after is None else f"the final accuracy is {after.overall:.3f}"
            sys.stderr.write(f"error: {reached}, expected evaluation.min_accuracy ({minimum:g}) or more\n")
            return EXIT_STATUS["failed"]
        return EXIT_STATUS[self._reason]
