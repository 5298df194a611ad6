"""One run of the controller from start to exit: set up, train, recover, and leave a summary on every way out."""

import asyncio
import logging
import os
import signal
import sys
import time
from typing import Literal, NoReturn

import uvloop

from controller.preflight import Inputs, load_inputs
from controller.rollout.evaluation import Evaluator
from controller.rollout.kept_groups import GroupsRanOut
from controller.rollout.log_prob_check import RolloutMismatch
from controller.rollout.results import ScoringFailed
from controller.rollout.scoring import Scorer
from controller.run.checkpoint_writer import CheckpointFailed, CheckpointWriter
from controller.run.folder import RunFolder
from controller.run.restore import RestorePoint
from controller.run.state import RunState
from controller.tracking.display import open_display
from controller.tracking.logs import log_to
from controller.tracking.plots import write_report
from controller.tracking.recorder import Recorder
from controller.tracking.summary import ExitReason, Summary, Validation, WeightsDigests
from controller.tracking.trackers.process import TrackerProcess
from controller.trainer import Trainer
from controller.workers.client import Caller
from controller.workers.concurrency import run_watched
from controller.workers.launcher import GroupFailed
from controller.workers.recovery import RestartBudget
from controller.workers.worker_groups import WorkerGroups
from rewards.manager import RewardManager
from splitppo import failpoints
from splitppo.config import Config, ConfigError
from splitppo.config.batch_plan import batch_plan
from splitppo.config.threads import crowding, permitted_cores
from splitppo.logs import FILE_ONLY
from splitppo.rpc.errors import WireError
from splitppo.v1 import worker_pb2

log = logging.getLogger(__name__)

EXIT_STATUS: dict[ExitReason, int] = {"completed": 0, "failed": 1, "bad_input": 2}


def run_session(config: Config) -> int:
    """Runs `config` to its end and returns the exit status; ConfigError if its folder cannot be used."""
    with RunFolder(config) as folder:
        failpoints.arm(config.debug, folder.path, "controller")
        return int(uvloop.run(Session(folder).run()))


class Session:
    """Owns everything that one controller process opens, and closes it on every exit path."""

    def __init__(self, folder: RunFolder) -> None:
        self._config = config = folder.config
        self._folder = folder
        self._display = open_display()
        log_to(folder.path, self._display)
        caller = Caller(folder.lease.run_id, folder.lease.epoch, nonce=folder.lease.nonce)
        self._groups = WorkerGroups(config, folder.config_file, caller, self._on_progress)
        self._trackers = TrackerProcess(config, folder.path, folder.lease.run_id)
        self._recorder = Recorder(config, folder.path, self._display, on_line=self._trackers.wake)
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
        task = asyncio.current_task()
        assert task is not None
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._interrupt, number, task)
        try:
            await self._train()
            self._reason = "completed" if self._signal is None else "interrupted"
        except asyncio.CancelledError:
            self._reason = "interrupted"
            task.uncancel()
        except (ConfigError, GroupFailed, GroupsRanOut, RolloutMismatch, ScoringFailed, WireError, OSError) as error:
            self._reason = self._reason_of(error)
            self._explain(error)
        except Exception:
            log.exception("the run failed")
        finally:
            self._phase = "closing"
            await self._abandon()
            await self._groups.close()
            self._finish()
            await asyncio.to_thread(self._trackers.finish)  # may be cut short by a signal
        return self._exit_status()

    def _reason_of(self, error: Exception) -> ExitReason:
        if isinstance(error, ConfigError) or (isinstance(error, GroupFailed) and error.is_bad_input):
            return "bad_input"
        # Whoever stops the controller may stop the groups as well, before the step is done.
        return "failed" if self._signal is None or isinstance(error, GroupFailed) else "interrupted"

    def _interrupt(self, number: signal.Signals, task: asyncio.Task[object]) -> None:
        """The first signal lets the running step be finished and saved; the second one leaves at once."""
        if self._signal is not None or self._phase == "closing":
            self._leave_at_once()
        self._signal, self._reason = number, "interrupted"
        if self._phase == "training" and self._trainer is not None:
            step = self._trainer.state.step
            log.info("%s: finishing step %d, then saving; once more leaves at once", number.name, step)
            self._trainer.stop()
        else:
            task.cancel()

    def _leave_at_once(self) -> NoReturn:
        try:
            self._groups.kill()
            self._finish(with_report=False)
            self._folder.release()
            logging.shutdown()
        finally:
            os._exit(self._exit_status())

    async def _train(self) -> None:
        """Reads what the run needs, then trains on from the step at which it resumes."""
        config, folder = self._config, self._folder
        point = RestorePoint(config, folder.checkpoints)
        self._restored = point.state
        inputs = load_inputs(config)
        config = self._config = inputs.with_last_step(config)
        self._display.start(batch_plan(config), config, step=point.step)
        if warning := crowding(config, permitted_cores()):
            log.warning("%s", warning)
        sources, answers = inputs.scored_sources(config.reward), folder.path / "judge.jsonl"
        async with RewardManager(config.reward, sources, answers) as manager:
            scorer = Scorer(inputs.tokenizer, manager, inputs.reward_tokenizer)
            await self._train_recovering(point, inputs, scorer)

    async def _train_recovering(self, point: RestorePoint, inputs: Inputs, scorer: Scorer) -> None:
        services = self._config.services
        budget = RestartBudget(services.max_restarts, services.restart_backoff_s)
        while True:
            try:
                return await self._train_from(point, inputs, scorer)
            except (WireError, GroupFailed) as error:
                if self._signal is not None or not self._groups.can_recover(error):
                    raise
                pause_s = budget.take(self._recorder.last_step)
                if pause_s is None:
                    error.add_note(
                        f"services.max_restarts ({services.max_restarts}) recoveries without a new step are spent"
                    )
                    raise
                log.warning("recovering in %g s: %s", pause_s, error)
                await self._abandon()
                await self._groups.recover(error)
                await asyncio.sleep(pause_s)

    async def _train_from(self, point: RestorePoint, inputs: Inputs, scorer: Scorer) -> None:
        """Connects, restores both roles and the records to one checkpoint, and trains on to the end."""
        config, folder, recorder = self._config, self._folder, self._recorder
        workers = await self._groups.connect()
        folder.write_processes(workers.clients)
        spans = await point.restore(self._groups)
        recorder.restart_at(point.step, workers.clients, point.metrics, spans)
        self._restored = point.state
        evaluator = Evaluator(config, workers.actor, inputs.val_prompts, scorer)
        checkpoints = CheckpointWriter(
            folder.checkpoints, workers.trained, config, on_saved=recorder.add_spans, on_commit=recorder.release
        )
        prompts = inputs.prompts.restored(point.state.sampler)
        self._trainer = Trainer(config, workers, prompts, scorer, evaluator, checkpoints, recorder, point.state)
        self._phase = "training"
        try:
            await run_watched(self._trainer.fit(), self._groups.watch())
        except GroupsRanOut:  # nothing is lost: what is due of the steps before is completed
            await run_watched(self._trainer.join(), self._groups.watch())
            raise
        finally:
            self._phase = "preparing"
        if (stagnation := self._trainer.state.stagnation) and stagnation.ends(config.evaluation.early_stop):
            log.info("%s", stagnation.reason)
        self._digests = WeightsDigests(**await self._groups.weights_digests())

    def _on_progress(self, role: str, method: str, progress: worker_pb2.Progress) -> None:
        self._display.phase(role, progress.phase or method, progress.done, progress.total)

    async def _abandon(self) -> None:
        if self._trainer is not None:
            await self._trainer.abandon()

    def _finish(self, *, with_report: bool = True) -> None:
        """Writes the last lines, summary and report; what cannot be written is said, and the run counts as failed."""
        state = self._trainer.state if self._trainer else self._restored
        wall_s = time.monotonic() - self._started_s
        after = state.validation_after if state.validated_step > 0 else None
        self._summary = Summary(
            global_step=self._recorder.last_step if self._trainer else state.step,
            validation=Validation(before=state.validation_before, after=after),
            wall_s=wall_s,
            train_s=state.train_s,
            tokens=state.tokens,
            overlap=self._recorder.overlap(),
            weights_sha256=self._digests,
            exit_reason=self._reason,
            stopped_early=state.has_stagnated(self._config),
            best=state.best,
        )
        try:
            self._recorder.release_all()
            self._summary.write(self._folder.path / "summary.json")
        except OSError as error:
            self._reason = "failed"
            self._explain(error)
        if self._trainer is not None and with_report:
            run = self._config.run
            try:
                write_report(self._folder.path, name=run.name, schedule=run.schedule, wall_s=wall_s)
            except Exception as error:  # noqa: BLE001 - a picture does not cost a finished run its exit status
                log.warning("report.png could not be drawn: %s", error)
        self._display.finish(self._summary)

    def _explain(self, error: Exception) -> None:
        """One sentence for the user; where it happened is in the log file of the group that it names.

        Storage that fails once fails again while the run is closed: only the first time is told.
        """
        if isinstance(error, OSError | GroupsRanOut) and not isinstance(error, CheckpointFailed):
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
        minimum = self._config.evaluation.min_accuracy
        if self._reason == "completed" and minimum > 0.0:
            after = self._summary.validation.after
            if after is None or after.overall < minimum:
                reached = "nothing was validated" if after is None else f"the final accuracy is {after.overall:.3f}"
                sys.stderr.write(f"error: {reached}, expected evaluation.min_accuracy ({minimum:g}) or more\n")
                return EXIT_STATUS["failed"]
        return EXIT_STATUS[self._reason]
