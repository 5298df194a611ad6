"""Writes `events.jsonl`: what happened in a run, with its losses. Nothing is ever removed from it."""

import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from controller.tracking.events import (
    CheckpointCommitted,
    Ended,
    Event,
    GroupLost,
    GroupsUp,
    Restored,
    RolloutRestarted,
    Started,
    StepBegun,
    StepDone,
    Validated,
)
from splitppo import __version__
from splitppo.clock import unix_s
from splitppo.run_folder.events import append_event
from splitppo.run_folder.metrics import SCORE

_MAX_CUT_SPANS = 2000


@dataclass(frozen=True)
class _Loss:
    """The first loss since the run was in order: when, in which step, and the pause before the restart."""

    unix_s: float
    step: int
    pause: float | str


class EventLog:
    """The sink of events.jsonl. `submit` gets what is to be done in the thread that records, with its name."""

    def __init__(self, folder: Path, *, epoch: int, submit: Callable[[str, Callable[[], None]], None]) -> None:
        self._folder = folder
        self._epoch = epoch
        self._submit = submit
        self._step = 0
        self._instances: dict[str, str] = {}
        self._loss: _Loss | None = None

    def receive(self, event: Event) -> None:
        """Writes an event, if it is one for the file."""
        match event:
            case Started():
                self._write_start(event)
            case StepBegun():
                self._step = event.step
            case StepDone():
                record = event.record
                self._write("step", record.step, seconds=record.step_s, score=event.metrics.get(SCORE))
            case Validated():
                validation = event.validation
                seconds = validation.timings_s.get("testing")
                self._write("validation", event.step, accuracy=validation.accuracy.overall, seconds=seconds)
            case CheckpointCommitted():
                self._write("checkpoint", event.step, seconds=event.seconds)
            case Ended():
                self._submit("the end", partial(self._write_end, event, self._head()))
            case _:
                self._receive_loss(event)

    def _receive_loss(self, event: Event) -> None:
        """Writes an event if it is about the loss of a group, or about a start or a way back after one."""
        match event:
            case GroupsUp():
                self._write_groups(event)
            case GroupLost():
                self._write_loss(event)
            case RolloutRestarted():
                self._write("rollout_restart", cause=event.cause, seconds=self._seconds_lost())
            case Restored():
                self._write_restored(event)

    def write_failure(self, why: str) -> None:
        """Writes at once, in the thread that records, why something is missing in the record."""
        with suppress(OSError):
            append_event(self._folder, {**self._head(), "kind": "record_failed", "why": why})

    def _write(self, kind: str, step: int | None = None, /, **fields: Any) -> None:
        """Appends an event; `step` is by default the running one."""
        event = {**self._head(step), "kind": kind, **fields}
        self._submit(f"event {kind}", partial(append_event, self._folder, event))

    def _head(self, step: int | None = None) -> dict[str, Any]:
        return {"unix_s": unix_s(), "epoch": self._epoch, "step": self._step if step is None else step}

    def _write_start(self, event: Started) -> None:
        self._step = event.resumed_at
        process = {"pid": os.getpid(), "host": os.uname().nodename, "version": __version__}
        self._write("start", resumed_at=event.resumed_at, **process, changes=list(event.changes))

    def _write_groups(self, event: GroupsUp) -> None:
        """Writes the groups that were started since the last time, and the way back after a loss."""
        new = [client for client in event.clients if self._instances.get(client.role) != client.worker.instance_id]
        for client in new:
            self._instances[client.role] = client.worker.instance_id
            self._write("group_up", **client.group.event())
        if self._loss is not None and event.restored_step is not None:
            restarted = [client.role for client in new]
            kept = [client.role for client in event.clients if client not in new]
            steps = {"from_step": self._loss.step, "to_step": event.restored_step}
            self._write("recovery", **steps, restarted=restarted, kept=kept, pause_s=self._loss.pause)

    def _write_loss(self, event: GroupLost) -> None:
        place = event.place
        where = {"method": place.method or None, "phase": place.phase or None}
        self._write("group_lost", role=place.role, rank=place.rank, **where, cause=event.cause)
        self._loss = self._loss or _Loss(unix_s(), self._step, event.pause)

    def _seconds_lost(self) -> float:
        """Returns the seconds since the first loss, which is over now."""
        lost_s = unix_s() if self._loss is None else self._loss.unix_s
        self._loss = None
        return unix_s() - lost_s

    def _write_restored(self, event: Restored) -> None:
        """Writes that the run goes on from a checkpoint: `cut`, the work that was lost, and `recovered`, after a loss.

        A restore at the start of a run comes after no loss.
        """
        if event.cut:
            cut = event.cut[:_MAX_CUT_SPANS]
            self._write(
                "cut", spans=[(span.pool, span.name, span.step, span.started_s, span.finished_s) for span in cut]
            )
        if self._loss is not None:
            steps = {"from_step": self._loss.step, "to_step": event.step, "repeated_steps": event.num_repeated}
            self._write("recovered", **steps, seconds=self._seconds_lost())
        self._step = event.step

    def _write_end(self, event: Ended, head: dict[str, Any]) -> None:
        """Writes the last line: why the run ends, with which exit status, and the processor time of this thread."""
        facts = {
            "reason": event.reason,
            "exit_status": event.exit_status,
            "why": event.why,
            "record_cpu_s": time.thread_time(),
        }
        append_event(self._folder, {**head, "kind": "end", **facts})
