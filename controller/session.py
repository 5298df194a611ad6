"""One run of the controller from start to exit: set up, train, recover, and leave a summary on every way out."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
import time
from dataclasses import dataclass

import uvloop

from controller.checkpointing import CheckpointWriter
from controller.connection import ServiceGroups
from controller.data import PromptDataset, PromptTable, load_train_prompts, load_val_prompts
from controller.display import open_display
from controller.evaluation import Evaluator
from controller.launcher import GroupFailed
from controller.logs import log_to
from controller.recorder import Recorder
from controller.report import write_report
from controller.run_folder import RunFolder
from controller.run_state import RunState
from controller.scoring import Scorer
from controller.summary import ExitReason, Summary, Validation, WeightsDigests
from controller.tokenizer import load_tokenizer
from controller.trainer import Observers, Trainer
from rewards.manager import RewardManager
from splitppo.config import Config, ConfigError
from splitppo.config.plan import batch_plan
from splitppo.rpc.errors import DeadlineExceeded, PeerDied, Unavailable, WireError
from splitppo.v1 import worker_pb2

log = logging.getLogger(__name__)

JOIN_TIMEOUT_S = 60.0
EXIT_STATUS: dict[ExitReason, int] = {"completed": 0, "failed": 1, "bad_input": 2, "interrupted": 130}


def run_session(config: Config) -> int:
    """Runs `config` to its end and returns the exit status.

    Raises:
        ConfigError: the run folder cannot be used; nothing was written to it.
    """
    with RunFolder(config) as folder:
        status: int = uvloop.run(Session(config, folder).run())
        return status


@dataclass(frozen=True)
class Inputs:
    """What a run reads and judges with; it outlives lost groups."""

    prompts: PromptDataset
    val_prompts: PromptTable | None
    scorer: Scorer


class Session:
    """Owns everything that one controller process opens, and closes it on every exit path."""

    def __init__(self, config: Config, folder: RunFolder) -> None:
        self._config = config
        self._folder = folder
        self._display = open_display()
        log_to(folder.path, self._display)
        self._groups = ServiceGroups(config, folder, self._on_progress)
        self._recorder: Recorder | None = None
        self._trainer: Trainer | None = None
        self._summary: Summary
        self._digests = WeightsDigests()
        self._started_s = time.monotonic()

    async def run(self) -> int:
        """Trains; whatever happens, the groups are ended and summary.json is written."""
        task = self._cancel_on_signals()
        reason: ExitReason = "failed"
        try:
            await self._train()
            reason = "completed"
        except asyncio.CancelledError:
            reason = "interrupted"
            task.uncancel()
            await self._join()
        except ConfigError as error:
            reason = "bad_input"
            self._explain(error)
        except GroupFailed as error:
            reason = "bad_input" if error.is_bad_input else "failed"
            self._explain(error)
        except (WireError, OSError) as error:
            self._explain(error)
        except Exception:
            log.exception("the run failed")
        finally:
            await self._groups.close()
            self._finish(reason)
        return self._exit_status(reason)

    def _cancel_on_signals(self) -> asyncio.Task[object]:
        """SIGINT and SIGTERM end the run at the next await; the groups are drained, not killed."""
        task = asyncio.current_task()
        assert task is not None
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)
        return task

    async def _train(self) -> None:
        config = self._config
        tokenizer = load_tokenizer(
            config.data.tokenizer or config.actor.model,
            chat_template=config.data.chat_template,
            chat_template_kwargs=config.data.apply_chat_template_kwargs,
        )
        prompts = load_train_prompts(config.data, tokenizer, seed=config.run.seed)
        val_prompts = load_val_prompts(config.data, tokenizer)
        sources = prompts.table.data_sources | (val_prompts.data_sources if val_prompts else frozenset())
        self._display.start(batch_plan(config), config, step=self._folder.resume_step())
        self._recorder = Recorder(config, self._folder.path, self._display, prompts.epoch_of)
        async with RewardManager(config.reward, sources) as manager:
            inputs = Inputs(prompts, val_prompts, Scorer(tokenizer, manager))
            await self._train_until_done(inputs)
        self._digests = WeightsDigests(**await self._groups.weights_digests())

    async def _train_until_done(self, inputs: Inputs) -> None:
        """Trains; lost groups are restarted and restored, `services.max_restarts` times at most."""
        num_restarts = 0
        while True:
            try:
                return await self._train_from_checkpoint(inputs)
            except (Unavailable, PeerDied, DeadlineExceeded) as error:
                if num_restarts == self._config.services.max_restarts:
                    raise
                num_restarts += 1
                log.warning("lost a group, restarting it: %s", error)
                await self._abandon()
                await self._groups.recover(error)

    async def _train_from_checkpoint(self, inputs: Inputs) -> None:
        """Connects, restores both roles and the records to the last common checkpoint, and trains on from there."""
        config, folder, recorder = self._config, self._folder, self._recorder
        assert recorder is not None
        step = folder.resume_step()
        services = await self._groups.connect()
        await self._groups.restore(step)
        folder.checkpoints.forget_after(step)
        clients = self._groups.clients
        recorder.restart_at(step, clients)
        observers = Observers(
            Evaluator(config, services.actor, inputs.val_prompts, inputs.scorer),
            CheckpointWriter(folder.checkpoints, clients, config.checkpoint),
            recorder,
        )
        state = folder.load_state(step)
        self._trainer = Trainer(config, services, inputs.prompts, inputs.scorer, observers, state)
        await self._trainer.fit()

    def _on_progress(self, role: str, method: str, progress: worker_pb2.Progress) -> None:
        self._display.phase(role, progress.phase or method, progress.done, progress.total)

    async def _abandon(self) -> None:
        """Gives up what still runs in the background; the services run their commands to the end all the same."""
        if self._trainer is not None:
            await self._trainer.abandon()

    async def _join(self) -> None:
        """Before an interrupted run ends: the critic's update and the checkpoint that is being written are joined."""
        if self._trainer is None:
            return
        try:
            async with asyncio.timeout(JOIN_TIMEOUT_S):
                await self._trainer.join()
        except (TimeoutError, WireError, OSError) as error:
            log.warning("what was still running is lost: %s", error)

    def _finish(self, reason: ExitReason) -> None:
        """Writes report and summary; a picture that cannot be drawn does not cost the summary."""
        state = self._trainer.state if self._trainer else RunState.initial(self._config)
        wall_s = time.monotonic() - self._started_s
        self._summary = Summary(
            global_step=self._recorder.last_step if self._recorder else 0,
            validation=Validation(
                before=state.validation_before,
                after=state.validation_after if state.validated_step > 0 else None,
            ),
            wall_s=wall_s,
            train_s=state.train_s,
            tokens=state.tokens,
            overlap=self._recorder.overlap() if self._recorder else None,
            weights_sha256=self._digests,
            exit_reason=reason,
        )
        self._summary.write(self._folder.path / "summary.json")
        if self._recorder is not None:
            self._recorder.close_files()
            run = self._config.run
            try:
                write_report(self._folder.path, name=run.name, schedule=run.schedule, wall_s=wall_s)
            except Exception:
                log.exception("report.png could not be drawn")
        self._display.finish(self._summary)

    def _explain(self, error: Exception) -> None:
        """One sentence for the user; where it happened is in the log file of the group that it names."""
        self._display.close()
        sys.stderr.write(f"error: {error}\n")

    def _exit_status(self, reason: ExitReason) -> int:
        """The process's exit status; a completed run fails if it stays under `evaluation.min_accuracy`."""
        minimum = self._config.evaluation.min_accuracy
        after = self._summary.validation.after
        if reason == "completed" and minimum > 0.0 and (after is None or after.overall < minimum):
            reached = "nothing was validated" if after is None else f"the final accuracy is {after.overall:.3f}"
            sys.stderr.write(f"error: {reached}, expected evaluation.min_accuracy ({minimum:g}) or more\n")
            return EXIT_STATUS["failed"]
        return EXIT_STATUS[reason]
