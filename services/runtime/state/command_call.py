"""Defines a command's call: its request, its reply, and the events (progress, parts, messages, reply) for callers."""

import hashlib
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, NamedTuple

from services.runtime.command import Command
from services.runtime.state.command_messages import CommandMessages
from splitppo.rpc.errors import InvalidArgument, Place, WireError
from splitppo.v1 import worker_pb2

# Callers get progress at most this often, and at each new phase.
_PROGRESS_INTERVAL_S = 0.05

# Progress, parts, messages, and last of all the result or the error.
Event = worker_pb2.CommandEvent | WireError


class StoredReply(NamedTuple):
    """A command's stored reply and the sha256 of its request (empty: stored by an older version of SplitPPO)."""

    request_sha256: str
    reply: worker_pb2.CommandResult


class CommandCall:
    """One call of a command until its reply, with a list of events for its callers that only grows. Thread-safe.

    Several callers may wait for one call: they join by the same request id, and may time out or cancel. Each reads
    the events from the first one on; the command goes on without a caller.

    Attributes:
        request_sha256: sha256 of the request without run_id and epoch, so that a newer controller may repeat it.
        progress: the newest progress; not every progress becomes an event.
        newest_progress: the last event with progress.
        answered: set once the result or the error is among the events.
        messages: those that callers and ranks exchange while the command runs; None if it exchanges none.
        cancelled_because: why the ranks must stop the command; empty if the command is not cancelled.
    """

    def __init__(self, command: Command, request: Any) -> None:
        self.command = command
        self.request = request
        self.request_id: str = request.header.request_id
        self.request_sha256 = _digest(command.method, request)
        self.progress: worker_pb2.Progress | None = None
        self.newest_progress: worker_pb2.CommandEvent | None = None
        self.answered = threading.Event()
        self.messages: CommandMessages | None = None
        self.cancelled_because = ""
        self._events: list[Event] = []
        self._more: Future[None] = Future()
        self._lock = threading.Lock()
        self._progress_at = 0.0
        self._on_cancel: Callable[[], None] = lambda: None

    @property
    def reply_key(self) -> str:
        """The key of the call's stored reply: method and request id, because another method must not get the reply."""
        return f"{self.command.method} {self.request_id}"

    def check_same(self, request_sha256: str) -> None:
        """Raises InvalidArgument if another request reuses this call's request id, but has a different sha256."""
        if request_sha256 not in ("", self.request_sha256):
            raise InvalidArgument(
                f"request id {self.request_id!r} belongs to another request than this {self.command.method}"
            )

    def stored(self, reply: worker_pb2.CommandResult) -> StoredReply:
        """Wraps a reply to this call into a `StoredReply`, which later answers repetitions of the request."""
        return StoredReply(self.request_sha256, reply)

    @property
    def place(self) -> Place:
        return replace(self.command.place_of(self.request), phase=self.progress.phase if self.progress else "")

    def read(self, start: int) -> tuple[Sequence[Event], Future[None]]:
        """Returns the call's events from an index on, and a future that resolves when the next event is added."""
        with self._lock:
            return self._events[start:], self._more

    def report(self, done: int, total: int, phase: str) -> None:
        """Stores the call's newest progress; adds an event at most every 50 ms, for a new phase, and at the end."""
        now = time.monotonic()
        last = self.progress
        self.progress = worker_pb2.Progress(done=done, total=total, phase=phase)
        is_due = last is None or last.phase != phase or last.done < total <= done
        if is_due or now - self._progress_at >= _PROGRESS_INTERVAL_S:
            self._progress_at = now
            self.newest_progress = worker_pb2.CommandEvent(progress=self.progress)
            self._append(self.newest_progress)

    def announce(self, event: worker_pb2.CommandEvent) -> None:
        """Adds an event that tells callers what the running command has made: a part of its slot, or a message."""
        self._append(event)

    def resolve(self, reply: worker_pb2.CommandResult) -> None:
        """Answers this command call with a reply, unless the call is answered already."""
        self._append(worker_pb2.CommandEvent(result=reply), is_last=True)

    def fail(self, error: WireError) -> None:
        """Answers this command call with an error, unless the call is answered already."""
        self._append(error.at(self.place), is_last=True)

    def cancel(self, because: str) -> None:
        """Asks all ranks to stop the command early, if its effect allows it; they may still finish the command."""
        with self._lock:
            if not self.command.effect.can_be_cancelled or self.cancelled_because or self.answered.is_set():
                return
            self.cancelled_because = because
            tell_ranks = self._on_cancel
        tell_ranks()

    def on_cancel(self, callback: Callable[[], None]) -> None:
        """Registers a function to be called once, in any thread, when the call is cancelled, or at once if it is."""
        with self._lock:
            self._on_cancel = callback
            is_cancelled = bool(self.cancelled_because)
        if is_cancelled:
            callback()

    def _append(self, event: Event, *, is_last: bool = False) -> None:
        """Adds an event and wakes everybody who waits for one; after the answer (`is_last`) nothing more is added."""
        with self._lock:
            if self.answered.is_set():
                return
            self._events.append(event)
            more = self._more
            self._more = Future()
            if is_last:
                self.answered.set()
        more.set_result(None)  # without the lock: it calls those who wait


def _digest(method: str, request: Any) -> str:
    """Computes the sha256 of a request without run id and epoch, which differ when another controller repeats it."""
    content = type(request)()
    content.CopyFrom(request)
    for field in ("run_id", "epoch"):
        content.header.ClearField(field)
    return hashlib.sha256(method.encode() + b"\0" + content.SerializeToString(deterministic=True)).hexdigest()
