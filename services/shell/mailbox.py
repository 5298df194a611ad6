"""The mailbox of a service: commands in the order of their arrival, each with the clients that wait for it."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from services.shell.commands import Command
from splitppo.rpc.errors import InvalidArgument, Place, QueueFull, Unavailable, WireError
from splitppo.v1 import worker_pb2

# Clients are told of progress at most this often, and of every new phase.
_PROGRESS_INTERVAL_S = 0.05
_CHECKPOINT_IS_LOADED = "a checkpoint is being loaded"


class Call:
    """A command on its way: what was asked, how far it is, and its reply.

    Clients come and go (they join under the same request id, they time out, they cancel); the command goes on.
    """

    def __init__(self, command: Command, request: Any) -> None:
        self.command = command
        self.request = request
        self.progress: worker_pb2.Progress | None = None
        self._reply: Future[worker_pb2.CommandResult] = Future()
        self._listeners: set[Callable[[], None]] = set()
        self._lock = threading.Lock()
        self._told_at = 0.0
        self._parts: list[worker_pb2.PartReady] = []
        self._cancelled_because = ""
        self._on_cancel: Callable[[], None] = lambda: None

    @property
    def request_id(self) -> str:
        request_id: str = self.request.header.request_id
        return request_id

    @property
    def reply_key(self) -> str:
        """What its reply is kept under: no other method is answered with it."""
        return f"{self.command.method} {self.request_id}"

    @property
    def place(self) -> Place:
        """The method, the step and the phase, for errors."""
        return replace(self.command.place_of(self.request), phase=self.progress.phase if self.progress else "")

    @property
    def works_on_slot(self) -> bool:
        """Whether its request names a slot, whose rows it is given."""
        return "slot" in self.request.DESCRIPTOR.fields_by_name

    @property
    def is_done(self) -> bool:
        return self._reply.done()

    @property
    def parts(self) -> Sequence[worker_pb2.PartReady]:
        """The parts of the slot that are ready so far, in the order in which they were."""
        return self._parts

    @property
    def cancelled_because(self) -> str:
        """Why the engine is to give the command up; empty while it is wanted."""
        return self._cancelled_because

    def cancel(self, because: str) -> None:
        """Asks the engine to give the command up, where it can be; it may still be finished."""
        with self._lock:
            if not self.command.cancellable or self._cancelled_because or self._reply.done():
                return
            self._cancelled_because = because
            tell_ranks = self._on_cancel
        tell_ranks()

    def on_cancel(self, callback: Callable[[], None]) -> None:
        """`callback` is called once, in any thread, when the call is cancelled; at once if it is already."""
        with self._lock:
            self._on_cancel = callback
            is_cancelled = bool(self._cancelled_because)
        if is_cancelled:
            callback()

    def start(self) -> bool:
        """Takes the call out of the queue for good; False when it has been answered in the meantime."""
        return self._reply.set_running_or_notify_cancel() if not self._reply.done() else False

    def report(self, done: int, total: int, phase: str) -> None:
        """Progress of the engine loop; listeners are told of the newest only."""
        is_new_phase = self.progress is None or self.progress.phase != phase
        self.progress = worker_pb2.Progress(done=done, total=total, phase=phase)
        now = time.monotonic()
        if is_new_phase or done >= total or now - self._told_at >= _PROGRESS_INTERVAL_S:
            self._told_at = now
            self._tell()

    def part_ready(self, part: worker_pb2.PartReady) -> None:
        """A part of the slot can be fetched."""
        with self._lock:
            self._parts.append(part)
        self._tell()

    def resolve(self, reply: worker_pb2.CommandResult) -> None:
        """Answers; an answer given before stands."""
        with self._lock:
            if not self._reply.done():
                self._reply.set_result(reply)
        self._tell()

    def fail(self, error: WireError) -> None:
        """Answers with an error; an answer given before stands."""
        with self._lock:
            if not self._reply.done():
                self._reply.set_exception(error.at(self.place))
        self._tell()

    def result(self) -> worker_pb2.CommandResult:
        """The reply of a call that is done, or its error."""
        return self._reply.result(timeout=0)

    def wait(self, timeout_s: float) -> None:
        """Blocks until the call is answered, or not in time."""
        ended = threading.Event()
        self.when_done(ended.set)
        ended.wait(timeout_s)

    def when_done(self, callback: Callable[[], None]) -> None:
        self._reply.add_done_callback(lambda _: callback())

    def listen(self, listener: Callable[[], None]) -> None:
        """`listener` is called, in any thread, whenever there is news."""
        with self._lock:
            self._listeners.add(listener)

    def unlisten(self, listener: Callable[[], None]) -> None:
        with self._lock:
            self._listeners.discard(listener)

    def _tell(self) -> None:
        with self._lock:
            listeners = list(self._listeners)
        for listener in listeners:
            listener()


class MailboxClosed(Exception):
    """The mailbox is closed and empty: there is nothing left to do."""


class Mailbox:
    """A bounded queue of calls, filled by the gRPC thread and emptied by the main thread, one call at a time."""

    def __init__(self, max_queued: int) -> None:
        self._max_queued = max_queued
        self._queue: deque[Call] = deque()
        # Queued, running, and done but not durable yet; by request id.
        self._open: dict[str, Call] = {}
        self._changed = threading.Condition()
        self._closed_because: WireError | None = None
        self._running: Call | None = None

    @property
    def running(self) -> Call | None:
        """The call that the main thread works on."""
        call = self._running
        return call if call is not None and not call.is_done else None

    @property
    def num_queued(self) -> int:
        return len(self._queue)

    def admit(self, call: Call, stored_reply: Callable[[], worker_pb2.CommandResult | None]) -> Call:
        """Queues a call, or joins it to the open one of the same request id, or answers it with its stored reply.

        A call that repairs comes next: what waits is refused, what runs is cancelled where it can be.

        Raises:
            InvalidArgument: the request id is that of another request.
            QueueFull, Unavailable: there is no room, or the service takes no more commands.
        """
        with self._changed:
            known = self._open.get(call.request_id)
            if known is not None:
                if known.command is not call.command or known.request != call.request:
                    raise InvalidArgument(f"request id {call.request_id!r} belongs to another {known.command.method}")
                return known
            # Looked up second: a call leaves the open ones only after its reply was stored.
            reply = stored_reply()
            if reply is not None:
                call.resolve(reply)
                return call
            refused = self._make_way() if call.command.repairs and self._closed_because is None else []
            self._enqueue(call)
        for one in refused:
            one.fail(Unavailable(_CHECKPOINT_IS_LOADED))
        call.when_done(lambda: self._forget(call))
        return call

    def _make_way(self) -> list[Call]:
        """Takes all that waits, but for other repairs, out of the queue, and cancels what runs."""
        refused = [call for call in self._queue if not call.command.repairs]
        self._queue = deque(call for call in self._queue if call.command.repairs)
        self.cancel_running(_CHECKPOINT_IS_LOADED)
        return refused

    def _enqueue(self, call: Call) -> None:
        if self._closed_because is not None:
            raise type(self._closed_because)(self._closed_because.message)
        if len(self._queue) >= self._max_queued:
            raise QueueFull(f"the mailbox holds {self._max_queued} commands (services.max_queued_commands)")
        self._queue.append(call)
        self._open[call.request_id] = call
        self._changed.notify_all()

    def _forget(self, call: Call) -> None:
        with self._changed:
            self._open.pop(call.request_id, None)

    def take(self, timeout_s: float) -> Call | None:
        """The next call, which runs until the next `take`; None when none came in time.

        Raises:
            MailboxClosed: there will be no more.
        """
        with self._changed:
            self._running = None
            self._changed.wait_for(lambda: self._queue or self._closed_because, timeout_s)
            while self._queue:
                call = self._queue.popleft()
                if call.start():
                    self._running = call
                    return call
            if self._closed_because is not None:
                raise MailboxClosed
            return None

    def supersede(self, because: str) -> None:
        """Refuses all calls that have not begun, and cancels the one that runs, where it can be."""
        with self._changed:
            refused, self._queue = list(self._queue), deque()
        for call in refused:
            call.fail(Unavailable(because))
        self.cancel_running(because)

    def cancel_running(self, because: str) -> None:
        """Cancels the call that runs, where it can be."""
        if (running := self._running) is not None:
            running.cancel(because)

    def close(self, because: WireError) -> None:
        """Refuses all calls that have not begun, now and later."""
        with self._changed:
            if self._closed_because is not None:
                return
            self._closed_because = because
            refused = list(self._queue)
            self._queue.clear()
            self._changed.notify_all()
        for call in refused:
            call.fail(type(because)(because.message))

    def fail_open(self, error: WireError) -> None:
        """Answers everything that is open with an error."""
        with self._changed:
            calls = list(self._open.values())
        for call in calls:
            call.fail(type(error)(error.message, error.place))

    def wait_open(self, timeout_s: float) -> None:
        """Waits until every open call is answered (checkpoints that are still being written)."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            calls = list(self._open.values())
        for call in calls:
            call.wait(max(0.0, deadline - time.monotonic()))


def draining() -> Unavailable:
    """What a service says that is about to end."""
    return Unavailable("the service is draining and takes no more commands")
