"""Queues the commands of a service in the order of arrival; calls with the same request id share one command."""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from copy import copy

from services.runtime.command import Effect
from services.runtime.state.command_call import CommandCall
from splitppo.rpc.errors import Busy, Unavailable, WireError
from splitppo.v1 import worker_pb2

_WEIGHTS_ARE_LOADED = "other weights are being loaded"


class CommandQueueClosed(Exception):
    """The command queue is closed and empty: no call will be queued any more."""


class CommandQueue:
    """A bounded queue of command calls: the gRPC thread adds calls, the main thread takes one at a time."""

    def __init__(self, max_queued: int) -> None:
        self._max_queued = max_queued
        self._queue: deque[CommandCall] = deque()
        # Calls by request id: queued, running, or done but not durable yet. `admit` removes those that are answered.
        self._open: dict[str, CommandCall] = {}
        self._changed = threading.Condition()
        self._closed_because: WireError | None = None
        self._running: CommandCall | None = None

    @property
    def running(self) -> CommandCall | None:
        """The command call that the main thread works on; None if the main thread waits for a call."""
        call = self._running
        return call if call is not None and not call.answered.is_set() else None

    @property
    def num_queued(self) -> int:
        return len(self._queue)

    def admit(
        self, call: CommandCall, stored_reply: Callable[[CommandCall], worker_pb2.CommandResult | None]
    ) -> CommandCall:
        """Queues a command call, joins the open call of the same request id, or answers it with a stored reply.

        A command that loads weights refuses the calls that wait, and cancels the running call if possible.

        Raises:
            InvalidArgument: the request id is that of another request.
            Busy, Unavailable: there is no room, or the service takes no more commands.
        """
        with self._changed:
            self._open = {name: other for name, other in self._open.items() if not other.answered.is_set()}
            if (same := self._open.get(call.request_id)) is not None:
                call.check_same(same.request_sha256)
                return same
            # Looked up after the open calls, because a reply is stored before its call is answered.
            if (reply := stored_reply(call)) is not None:
                call.resolve(reply)
                return call
            if self._closed_because is not None:
                raise copy(self._closed_because)
            if call.command.effect is Effect.LOADS:
                self._make_way_for_weights()
            if len(self._queue) >= self._max_queued:
                raise Busy(f"the command queue holds {self._max_queued} commands (services.max_queued_commands)")
            self._queue.append(call)
            self._open[call.request_id] = call
            self._changed.notify_all()
            return call

    def _make_way_for_weights(self) -> None:
        """Refuses queued calls that do not load weights themselves, and cancels the running call if possible."""
        loading = [queued for queued in self._queue if queued.command.effect is Effect.LOADS]
        waiting = [queued for queued in self._queue if queued.command.effect is not Effect.LOADS]
        self._queue = deque(loading)
        _fail(waiting, Unavailable(_WEIGHTS_ARE_LOADED))
        self.cancel_running(_WEIGHTS_ARE_LOADED)

    def take(self, timeout_s: float) -> CommandCall | None:
        """Takes the next call from the queue; `running` is this call until the next `take`. None if none came in time.

        Raises:
            CommandQueueClosed: the queue is closed and empty.
        """
        with self._changed:
            self._running = None
            self._changed.wait_for(lambda: self._queue or self._closed_because, timeout_s)
            if self._queue:
                self._running = self._queue.popleft()
            elif self._closed_because is not None:
                raise CommandQueueClosed
            return self._running

    def supersede(self, because: str) -> None:
        """Refuses all queued calls that have not begun, and cancels the running call if it can be cancelled."""
        with self._changed:
            self._refuse_queued(Unavailable(because))
        self.cancel_running(because)

    def cancel_running(self, because: str) -> None:
        if (running := self._running) is not None:
            running.cancel(because)

    def close(self, because: WireError) -> None:
        """Refuses all waiting and all future calls; future calls get the reason given to the first `close`."""
        with self._changed:
            self._closed_because = self._closed_because or because
            self._refuse_queued(self._closed_because)
            self._changed.notify_all()

    def fail_open(self, error: WireError) -> None:
        with self._changed:
            _fail(list(self._open.values()), error)

    def wait_open(self, timeout_s: float) -> None:
        """Waits until every open call is answered, e.g. saves of checkpoints in progress; at most timeout_s seconds."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            calls = list(self._open.values())
        for call in calls:
            call.answered.wait(max(0.0, deadline - time.monotonic()))

    def _refuse_queued(self, because: WireError) -> None:
        _fail(list(self._queue), because)
        self._queue.clear()


def _fail(calls: Sequence[CommandCall], error: WireError) -> None:
    for call in calls:
        call.fail(copy(error))  # each copy gets the place of its own call


def draining() -> Unavailable:
    """Makes the error with which a service that is draining (about to end) refuses commands."""
    return Unavailable("the service is draining and takes no more commands")
