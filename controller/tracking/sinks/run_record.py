"""Records a run for people and the browser view: its rollouts, its events, and what it does now.

Everything is written by one thread (`RecordWorker`). What fails there is missing in the record, and nothing else.
"""

import asyncio
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import tokenizers

from controller.tracking.record.rollout_store import RolloutStore
from controller.tracking.record.worker import RecordWorker
from controller.tracking.step_record import StepRecord
from controller.validation.result import ValidationResult
from controller.workers.clients import WorkerClient
from splitppo import __version__
from splitppo.clock import unix_s
from splitppo.config import Config
from splitppo.rpc.errors import Place
from splitppo.run_folder.events import append_event
from splitppo.run_folder.live import IDLE, LiveFile
from splitppo.run_folder.metrics import SCORE
from splitppo.run_folder.spans import Span
from splitppo.v1 import worker_pb2

_MAX_CUT_SPANS = 2000
_POLL_S = 5.0
_POLL_TIMEOUT_S = 2.0
_BYTES_PER_GB = 1e9


class RunRecord:
    """The record of one start of a run, from `start` on; before, nothing is written, as a start may be refused."""

    def __init__(self, config: Config, folder: Path, *, run_id: str = "", epoch: int = 0) -> None:
        self._config = config
        self._folder = folder
        self._epoch = epoch
        self.live = LiveFile(folder, run_id=run_id, epoch=epoch)
        self._store = RolloutStore(folder / "rollouts", config.tracking.rollouts.max_gb * _BYTES_PER_GB)
        self._worker = RecordWorker(self.live.write_if_due, self._append_failure)
        self._tokenizer: tokenizers.Tokenizer | None = None
        self._has_started = False
        self._instances: dict[str, str] = {}
        self._lost: tuple[float, int, float | str] | None = None  # when, in which step, and the pause

    def start(
        self, tokenizer: tokenizers.Tokenizer, *, total_steps: int, resumed_at: int, changes: Sequence[str]
    ) -> None:
        """Begins the record of this start, once it is sure that the run goes on."""
        self._tokenizer = tokenizer
        self._has_started = True
        self.live.set(step=resumed_at, total_steps=total_steps)
        where: dict[str, Any] = {"pid": os.getpid(), "host": os.uname().nodename, "version": __version__}
        self.event("start", resumed_at=resumed_at, **where, changes=list(changes))

    def event(self, kind: str, *, step: int | None = None, **fields: Any) -> None:
        """Appends an event to events.jsonl; `step` is by default the running one."""
        if self._has_started:
            event = {**self._head(step), "kind": kind, **fields}
            self._worker.submit(f"event {kind}", partial(append_event, self._folder, event))

    def _append_failure(self, why: str) -> None:
        with suppress(OSError):
            append_event(self._folder, {**self._head(), "kind": "record_failed", "why": why})

    def groups_up(self, clients: Sequence[WorkerClient], restored_step: int | None = None) -> None:
        """Records the groups that were started since the last call.

        `restored_step` is the step to which a run goes back after a loss; None if no step is repeated.
        """
        new = [client for client in clients if self._instances.get(client.role) != client.worker.instance_id]
        for client in new:
            self._instances[client.role] = client.worker.instance_id
            self.event("group_up", **client.group.event())
        if self._lost is not None and restored_step is not None:
            _, from_step, pause_s = self._lost
            kept = [client.role for client in clients if client not in new]
            groups: dict[str, Any] = {"restarted": [client.role for client in new], "kept": kept}
            self.event("recovery", from_step=from_step, to_step=restored_step, **groups, pause_s=pause_s)

    def lost(self, place: Place, cause: str, pause_s: float | str) -> None:
        """Records the loss of a group, with the pause before it is started again, or why it is not."""
        self.live.set(phase="recovering")
        self.live.idle(place.role)
        where = {name: getattr(place, name) or None for name in ("method", "phase")}
        self.event("group_lost", role=place.role, rank=place.rank, **where, cause=cause)
        self._lost = self._lost or (unix_s(), self.live.step, pause_s)

    def rollout_restarted(self, cause: str) -> None:
        """Records that the rollout group is there again after its loss, without a step done again."""
        self.live.set(phase="training")
        lost_s = self._lost
        self._lost = None
        self.event("rollout_restart", cause=cause, seconds=unix_s() - (lost_s or (unix_s(),))[0])

    def restart_at(self, step: int, restored_step: int, cut: Sequence[Span], *, num_repeated: int) -> None:
        """Removes the rollouts of steps after `restored_step`; `cut` are the spans that the timeline loses.

        `step` is where the run goes on; `num_repeated` steps were complete and are done again.
        """
        if cut:
            spans = [(one.pool, one.name, one.step, one.started_s, one.finished_s) for one in cut[:_MAX_CUT_SPANS]]
            self.event("cut", spans=spans)
        if self._lost is not None:
            lost_s, from_step, _ = self._lost
            steps = {"from_step": from_step, "to_step": step, "repeated_steps": num_repeated}
            self.event("recovered", **steps, seconds=unix_s() - lost_s)
            self._lost = None
        if self._has_started:
            self._worker.submit("the way back", partial(self._store.cut_back, restored_step))
        self.live.set(step=step, phase="training")

    def step(self, record: StepRecord, metrics: Mapping[str, float]) -> None:
        """Records a step whose updates have ended."""
        step = record.step
        self.event("step", step=step, seconds=record.step_s, score=metrics.get(SCORE))
        config = self._config.at_step(step)
        tokenizer = self._tokenizer
        self._put(f"step {step}", "train", step, lambda files: files.train_file(record, config, tokenizer))

    def validation(self, step: int, validation: ValidationResult, split: str) -> None:
        """Records a validation of the policy of a step in the folder `split`."""
        seconds = validation.timings_s.get("testing")
        self.event("validation", step=step, accuracy=validation.accuracy.overall, seconds=seconds)
        name = f"the validation after step {step}"
        self._put(name, split, step, lambda files: files.val_file(validation, self._config, step))

    def _put(self, name: str, split: str, step: int, content: Callable[[Any], Any]) -> None:
        """Has a file written, whose content `content` makes with the module `rollout_file`."""

        def put() -> None:
            from controller.tracking.record import rollout_file  # slow to import

            self._store.put(split, step, content(rollout_file))

        if self._has_started and self._config.tracking.rollouts.enable:
            self._worker.submit(name, put, is_large=True)

    def progress(self, role: str, method: str, progress: worker_pb2.Progress) -> None:
        """Notes how far a worker group is with a command."""
        self.live.set_pool(role, method=method, phase=progress.phase or None, done=progress.done, total=progress.total)

    async def poll(self, clients: Callable[[], Sequence[WorkerClient]]) -> None:
        """Asks every group for its status every 5 s, without end. The calls of the run say what is wrong, if any is."""
        while True:
            asked = clients()
            calls = (asyncio.wait_for(client.get_status(), _POLL_TIMEOUT_S) for client in asked)
            answers = await asyncio.gather(*calls, return_exceptions=True)  # a channel that is closed cancels its call
            for client, status in zip(asked, answers, strict=True):
                if isinstance(status, BaseException):
                    self.live.set_pool(client.role, state=None, queue=None)
                    continue
                state = worker_pb2.WorkerState.Name(status.state).removeprefix("WORKER_STATE_").lower()
                told = {"state": state, "queue": status.queued_commands, "committed_step": status.committed_step}
                self.live.set_pool(client.role, **told, **({} if status.running_method else IDLE))
            await asyncio.sleep(_POLL_S)

    def close(self, reason: str, exit_status: int, *, timeout_s: float = 30.0) -> None:
        """Records the end of the run, and waits until everything is written, for at most `timeout_s` seconds."""
        self.live.end()
        if self._has_started:
            self._worker.submit("the end", partial(self._put_end, reason, exit_status))
            self._worker.close(timeout_s)

    def _put_end(self, reason: str, exit_status: int) -> None:
        self.live.write_if_due(at_once=True)
        facts = {"reason": reason, "exit_status": exit_status, "record_cpu_s": time.thread_time()}
        append_event(self._folder, {**self._head(), "kind": "end", **facts})

    def _head(self, step: int | None = None) -> dict[str, Any]:
        """Returns the fields that every event begins with; `step` is by default the running one."""
        return {"unix_s": unix_s(), "epoch": self._epoch, "step": self.live.step if step is None else step}
