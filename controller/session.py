"""Runs one controller process: sets up, trains, recovers lost worker groups, and writes a summary however it ends."""

import asyncio
import logging
import os
import signal
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Literal, NoReturn

import uvloop

from controller.conversations.conversation import EnvironmentsFailed
from controller.conversations.environments import Environments, open_environments
from controller.data.image_checks import wrong_image
from controller.data.privileged_prompts import privileged_prompts
from controller.data.prompt_files import PromptRow
from controller.memory.gpus import check_devices, visible_gpus
from controller.memory.plan import memory_plan
from controller.outcome import RunOutcome, sentence
from controller.preflight import Inputs, check_setup, read_inputs
from controller.run.checkpoint_writer import CheckpointWriter
from controller.run.end import RunEnd
from controller.run.folder import RunFolder
from controller.run.restore import RestorePoint
from controller.run.state import RunState
from controller.sampling.keep import TooFewSampleGroups
from controller.sampling.stream import SamplingGroups
from controller.scoring.scorer import Scorer, ScoringFailed
from controller.step.log_prob_check import RolloutMismatch
from controller.step.look_ahead import step_rollouts
from controller.tracking.display import open_display
from controller.tracking.events import Closing, Ended, GroupLost, GroupsUp, Progressed, RolloutRestarted, Started
from controller.tracking.logs import log_to
from controller.tracking.recorder import Recorder
from controller.tracking.sinks.run_record import RunRecord
from controller.tracking.sinks.step_files import StepFiles
from controller.tracking.sinks.trackers import waking
from controller.tracking.trackers.process import TrackerProcess
from controller.trainer import Trainer
from controller.validation.evaluation import Evaluator
from controller.workers.concurrency import run_watched
from controller.workers.local_group import GroupFailed
from controller.workers.recovery import LOST_GROUP, RestartBudget
from controller.workers.worker_groups import WorkerGroups, Workers
from environments.record import Record
from rewards.manager import RewardManager
from splitppo import failpoints
from splitppo.config import Config, ConfigError
from splitppo.config.batch_plan import batch_plan
from splitppo.config.idle_policy import idle_policy
from splitppo.config.precision import fp32_on_gpus
from splitppo.config.threads import crowding
from splitppo.logs import FILE_ONLY
from splitppo.machine.cores import permitted_cores
from splitppo.machine.host_memory import host_memory
from splitppo.rpc.errors import Place, WireError
from splitppo.run_folder.processes import write_processes
from splitppo.run_folder.summary import Summary, WeightsDigests
from splitppo.v1 import worker_pb2

log = logging.getLogger(__name__)

# What ends a run with a sentence: it cannot go on as it was configured.
_ENDINGS = (EnvironmentsFailed, TooFewSampleGroups, RolloutMismatch, ScoringFailed)

# "starting": the inputs are accepted, and the groups are awaited and restored.
Phase = Literal["preparing", "starting", "training", "closing"]

# Keys of the section `run` that end a run.
_LIMITS = ("total_steps", "total_epochs", "stop_after_step")


def run_session(config: Config) -> int:
    """Trains by `config` to the end of the run; returns the exit status. ConfigError if the run folder is unusable."""
    with RunFolder(config) as folder:
        failpoints.arm(config.debug, folder.path, "controller")
        return int(uvloop.run(Session(folder).run()))


class Session:
    """One start of a controller: opens a run's groups, trackers, display and records, and closes them on every exit."""

    def __init__(self, folder: RunFolder) -> None:
        self._config = config = folder.config
        self._folder = folder
        self._display = open_display()
        self._outcome = RunOutcome(folder, self._display)
        log_to(folder.path, self._display)
        log.info("run %s, epoch %d", folder.lease.run_id, folder.lease.epoch, extra=FILE_ONLY)
        self._groups = WorkerGroups(config, folder.config_file, folder.lease, self._on_progress)
        self._restarts = RestartBudget(config.services.max_restarts, config.services.restart_backoff_s)
        self._trackers = TrackerProcess(config, folder.path, folder.lease.run_id)
        self._record = RunRecord(config, folder.path, run_id=folder.lease.run_id, epoch=folder.lease.epoch)
        files = StepFiles(config, folder.path)
        sinks = (files.receive, self._record.receive, waking(self._trackers.wake), self._display.receive)
        self._recorder = Recorder(config, sinks)
        self._trainer: Trainer | None = None
        self._rows: Sequence[PromptRow] = ()  # of all prompts
        self._restored = RunState.initial(config)
        self._phase: Phase = "preparing"

    async def run(self) -> int:
        """Trains, and returns the exit status. In every case the groups are ended and summary.json is written.

        A start whose inputs are refused leaves no new run folder.
        """
        task = asyncio.current_task()
        assert task is not None
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._interrupt, number, task)
        polling = asyncio.create_task(self._record.poll(lambda: self._groups.clients))
        is_refused = False
        try:
            await self._train()
            self._outcome.reason = "completed" if self._outcome.signal is None else "interrupted"
        except asyncio.CancelledError:
            self._outcome.reason = "interrupted"
            task.uncancel()
        except (ConfigError, GroupFailed, WireError, OSError, *_ENDINGS) as error:
            is_refused = isinstance(error, ConfigError) and self._phase == "preparing"
            self._outcome.fail(error)
        except Exception as error:
            log.exception("the run failed")
            self._outcome.why = f"{type(error).__name__}: {error}; the traceback is in logs/controller_0.log"
        finally:
            polling.cancel()
            status = await self._close()
            if is_refused:
                self._folder.remove_if_new()
        return status

    async def _close(self) -> int:
        """Ends the groups, writes summary.json, and closes record and trackers; returns the exit status."""
        self._phase = "closing"
        self._recorder.emit(Closing())
        await self._abandon()
        await self._groups.close()
        self._folder.remove_published_weights()
        self._outcome.finish(self._trainer, self._recorder, self._restored)
        status = self._outcome.exit_status()
        self._recorder.emit(Ended(self._outcome.reason, status, self._outcome.why))
        # Both may be cut short by a signal.
        await asyncio.to_thread(self._record.close)
        await asyncio.to_thread(self._trackers.finish)
        return status

    def _interrupt(self, number: signal.Signals, task: asyncio.Task[object]) -> None:
        """Handles SIGINT or SIGTERM: the first signal ends the run after the running step, the second at once."""
        if self._outcome.signal is not None or self._phase == "closing":
            self._leave_at_once()
        self._outcome.signal = number
        self._outcome.reason = "interrupted"
        if self._phase == "training" and self._trainer is not None:
            step = self._trainer.state.step
            log.info("%s: finishing step %d, then saving; once more leaves at once", number.name, step)
            self._trainer.stop()
        else:
            task.cancel()

    def _leave_at_once(self) -> NoReturn:
        """Ends the process on a second signal: kills the groups, writes the summary without a report, waits no more.

        Whatever fails on the way, the process ends with the exit status of the outcome.
        """
        try:
            self._groups.kill()
            self._folder.remove_published_weights()
            self._outcome.finish(self._trainer, self._recorder, self._restored, with_report=False)
            self._recorder.emit(Ended(self._outcome.reason, self._outcome.exit_status(), self._outcome.why))
            self._record.close(timeout_s=1.0)
            self._folder.release()
            logging.shutdown()
        finally:
            os._exit(self._outcome.exit_status())

    async def _train(self) -> None:
        """Loads and checks what the run needs, then trains from the step at which the run resumes."""
        point = RestorePoint(self._config, self._folder.checkpoints)
        self._restored = point.state
        self._outcome.resumed_at_step = point.step
        inputs = await self._read_inputs()
        config = self._config = inputs.with_last_step(self._config)
        if self._is_completed(inputs):
            self._folder.put_config_back()
            return
        step_rollouts(config, inputs.prompts, point.rollouts)  # refuses stored rollouts before anything is changed
        if not config.evaluation.val_only:
            self._folder.keep_rows(inputs.training_rows(config))
        self._say_what_starts(inputs, point.step)
        rewards = RewardManager(config.reward, inputs.scored_sources(config), self._folder.path / "judge.jsonl")
        rows = inputs.prompts.table.rows
        self._rows = inputs.rows
        async with rewards, open_environments(config, inputs.tokenizer, rows) as environments:
            self._phase = "starting"
            scorer = Scorer(inputs.tokenizer, rewards, inputs.reward_tokenizer, stop=config.rollout.stop)
            await self._train_recovering(partial(self._train_from, point, inputs, scorer, environments))

    async def _read_inputs(self) -> Inputs:
        """Checks and loads what the run needs; groups that start here load their models meanwhile."""
        config = self._config
        vocab_size = check_setup(config)
        gpus = visible_gpus(config)
        if gpus:  # without any, the ranks know whether there is a device of another kind
            check_devices(config, gpus)
        if self._completed_summary() is None:
            await self._groups.launch()
        return read_inputs(config, vocab_size)

    def _say_what_starts(self, inputs: Inputs, step: int) -> None:
        """Tells record and display how the run starts, after `step`, and warns of what may make it slow or fail."""
        config = self._config
        changes = self._folder.changes
        self._recorder.emit(Started(inputs.tokenizer.backend, config.last_step, step, changes, inputs.images_of))
        for change in changes:
            log.info("changed since the last start: %s", change)
        self._display.start(batch_plan(config), config, step=step)
        for line in inputs.image_report.splitlines():
            log.info("%s", line)
        gpus = visible_gpus(config)
        misfit = None  # an estimate ends no run
        if gpus:
            misfit = memory_plan(config, gpus, host_memory().total, image_bytes=inputs.image_bytes).misfit
        crowded = crowding(config, permitted_cores())
        for warning in filter(None, (crowded, fp32_on_gpus(config), idle_policy(config), misfit)):
            log.warning("%s", warning)

    def _completed_summary(self) -> Summary | None:
        """Returns the summary of an earlier start that completed the run with the step that this one resumes at.

        That step is still the last one unless a limit of the run was raised. None without such a start.
        """
        summary = Summary.read(self._folder.path / "summary.json")
        if self._config.evaluation.val_only or summary is None or not summary.finished:
            return None
        return summary if summary.global_step == self._restored.step else None

    def _is_completed(self, inputs: Inputs) -> bool:
        """Returns True if an earlier start of this run has done the last step, and summary.json says so."""
        config = self._config
        state = self._restored
        summary = self._completed_summary()
        has_stagnated = state.has_stagnated(config)
        is_at_its_end = has_stagnated or RunEnd.of(config, inputs.prompts).is_reached(state)
        if summary is None or not is_at_its_end:
            return False
        self._outcome.summary = summary
        if has_stagnated and state.stagnation:
            log.info("%s", state.stagnation.reason)
        limits = [f"run.{key}" for key in _LIMITS if getattr(self._folder.config.run, key) is not None]
        log.info(
            "the run in %s was completed with step %d, nothing is left to do: a larger %s continues it,"
            " evaluation.val_only=true validates it, and another run.dir starts a new run",
            *(self._folder.path, state.step),
            "evaluation.early_stop.patience" if has_stagnated else " or ".join(limits),
        )
        return True

    async def _train_recovering(self, train: Callable[[], Awaitable[None]]) -> None:
        """Trains to the end; after the loss of a group, trains again from the newest whole checkpoint."""
        while True:
            try:
                return await train()
            except (WireError, GroupFailed) as error:
                if self._outcome.signal is not None or not self._groups.can_recover(error):
                    raise
                pause_s = await self._pause_before_restart(error)
                log.warning("recovering in %g s: %s", pause_s, sentence(error))
                await self._abandon()
                await self._groups.discard_lost(error)
                await asyncio.sleep(pause_s)

    def _refuse_wrong_image(self, error: Exception) -> None:
        """Raises ConfigError if a group says that an image of the data files is wrong, as it would say again."""
        wrong = wrong_image(sentence(error), self._rows)
        if wrong is not None:
            raise ConfigError(wrong) from error

    async def _restart_rollout(self, error: Exception) -> None:
        """Starts the lost rollout group again; no other group is disturbed, and no step is done again."""
        self._refuse_wrong_image(error)
        if not self._groups.can_recover(error, ("rollout",)):
            raise error
        while True:
            pause_s = await self._pause_before_restart(error)
            log.warning("starting the rollout group again in %g s: %s", pause_s, sentence(error))
            await asyncio.sleep(pause_s)
            try:
                await self._groups.reopen("rollout")
                break
            except (*LOST_GROUP, GroupFailed) as again:
                error = again
        self._recorder.count_restart()
        write_processes(self._folder.path, [client.group for client in self._groups.clients])
        self._recorder.emit(GroupsUp(self._groups.clients))
        self._recorder.emit(RolloutRestarted(sentence(error)))

    async def _pause_before_restart(self, error: Exception) -> float:
        """Returns the pause before the restart of a lost group, in seconds; raises the error if none is left."""
        killed = await self._groups.oom_kill()
        pause_s = self._restarts.take(self._recorder.last_step, is_oom_kill=killed is not None)
        for note in (killed, await self._groups.end_reason(error), pause_s):
            if isinstance(note, str) and note not in getattr(error, "__notes__", ()):
                error.add_note(note)
        place = error.place if isinstance(error, WireError) else Place(role=getattr(error, "role", ""))
        self._recorder.emit(GroupLost(place, sentence(error), pause_s))
        if isinstance(pause_s, str):
            raise error
        return pause_s

    async def _train_from(
        self, point: RestorePoint, inputs: Inputs, scorer: Scorer, environments: Environments | None
    ) -> None:
        """Connects the groups, restores both roles and the records to one checkpoint, and trains to the end.

        The outcome of the run gets the digests of the weights with which it ends.
        """
        config = self._config
        folder = self._folder
        recorder = self._recorder
        workers = await self._groups.connect()
        write_processes(folder.path, [client.group for client in workers.clients])
        incomplete_step = max(folder.checkpoints.incomplete_steps(), default=0)
        spans = await point.restore(self._groups)
        recorder.emit(GroupsUp(workers.clients, point.step))
        if self._trainer is None:
            self._outcome.resumed_at_step = point.step
        else:
            _log_way_back(point.step, self._trainer.state.step, incomplete_step)
        recorder.restart_at(point.step, workers.clients, point.metrics, spans)
        self._restored = point.state
        trainer = self._trainer = self._make_trainer(workers, point, inputs, scorer, environments)
        await self._fit(trainer, None if environments is None else environments.record)
        if (stagnation := trainer.state.stagnation) and stagnation.ends(config.evaluation.early_stop):
            log.info("%s", stagnation.reason)
        self._outcome.digests = WeightsDigests(**await self._groups.weights_digests())

    def _make_trainer(
        self,
        workers: Workers,
        point: RestorePoint,
        inputs: Inputs,
        scorer: Scorer,
        environments: Environments | None,
    ) -> Trainer:
        """Makes what samples, validates and saves with the connected groups, and the trainer that goes on from `point`.

        With each committed checkpoint, records of steps that no checkpoint needs any more are given up.
        """
        config = self._config
        folder = self._folder
        recorder = self._recorder
        watch = partial(self._groups.watch, ("rollout",))
        sampling = SamplingGroups.of(config, workers, environments, watch=watch, restart=self._restart_rollout)
        evaluator = Evaluator(config, sampling, inputs.val_prompts, scorer)
        record = None if environments is None else environments.record

        def on_commit(step: int) -> None:
            recorder.release(step)
            if record is not None:
                record.remove(up_to=min(folder.checkpoints.steps()))

        checkpoints = CheckpointWriter(
            folder.checkpoints, workers.trained, config, on_saved=recorder.add_spans, on_commit=on_commit
        )
        rollouts = step_rollouts(config, inputs.prompts.restored(point.state.sampler), point.rollouts)
        privileged = privileged_prompts(config.critic, inputs.tokenizer)
        return Trainer(
            config, workers, sampling, rollouts, scorer, evaluator, checkpoints, recorder, point.state, privileged
        )

    async def _fit(self, trainer: Trainer, record: Record | None) -> None:
        """Trains to the end of the run, while the groups are watched; `record` has the answers of environments.

        Raises:
            ConfigError: a group has found out that an image of the data files cannot be read.
            EnvironmentsFailed: an environment failed; its answers of the unfinished step are removed from `record`, so
                that a resumed run asks it again.
            RolloutMismatch, ScoringFailed, TooFewSampleGroups: the step cannot be made. In all these cases the updates
                and saves of earlier steps are completed before, as far as the groups are there.
        """
        self._phase = "training"
        try:
            await self._fit_or_refuse(trainer)
        except (ConfigError, *_ENDINGS) as error:
            try:
                await run_watched(trainer.join(), self._groups.watch())
            except (WireError, GroupFailed, OSError) as other:
                error.add_note(f"earlier steps could not be completed: {sentence(other)}")
            if isinstance(error, EnvironmentsFailed) and record is not None:
                record.remove(after=self._recorder.last_step)
            if isinstance(error, TooFewSampleGroups):
                error.add_note(self._folder.checkpoints.way_to_others("keys"))
                error.add_note(self._folder.checkpoints.last_good())
            raise
        finally:
            self._phase = "starting"

    async def _fit_or_refuse(self, trainer: Trainer) -> None:
        """Trains to the end of the run; ConfigError if a group says that an image of the data files is wrong."""
        try:
            await run_watched(trainer.fit(), self._groups.watch())
        except (WireError, GroupFailed) as error:
            self._refuse_wrong_image(error)
            raise
        trainer.rollouts.check_next()  # `fit` may be stopped before the step that could not be filled

    def _on_progress(self, role: str, method: str, progress: worker_pb2.Progress) -> None:
        self._recorder.emit(Progressed(role, method, progress))

    async def _abandon(self) -> None:
        if self._trainer is not None:
            await self._trainer.abandon()


def _log_way_back(step: int, lost_step: int, incomplete_step: int) -> None:
    """Logs how many steps a recovery repeats: those after the restored `step`, up to `lost_step`, which was running."""
    why = f": the checkpoint of step {incomplete_step} was not complete" if incomplete_step > step else ""
    start = f"the checkpoint of step {step}" if step else "step 0, the initial models"
    log.warning("back to %s%s; steps made again: %d", start, why, lost_step - step)
