"""Runs one command on a worker: reads its progress events, limits silences, and repeats it over lost connections."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import grpc
import grpc.aio

from splitppo import failpoints
from splitppo.clock import unix_s
from splitppo.rpc.errors import Busy, DeadlineExceeded, Internal, Place, Unavailable, WireError, error_from_rpc
from splitppo.run_folder.spans import Parts, Span
from splitppo.v1 import worker_pb2

log = logging.getLogger(__name__)
T = TypeVar("T")
ProgressCallback = Callable[[str, str, worker_pb2.Progress], None]  # role, method, progress
EventCallback = Callable[[worker_pb2.CommandEvent], None]

_RETRY_PAUSE_S = 0.1
_SHORTEST_SYNC_S = 0.001  # a backend that samples with the policy itself copies nothing
_MAX_BUSY_PAUSE_S = 1.6
_END_OF_STREAM: Any = grpc.aio.EOF  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Limits:
    """The time and size limits of a worker client's calls.

    Attributes:
        progress_timeout_s: the longest silence of a running command, and the longest duration of any other call.
        reconnect_timeout_s: the time for which calls to an unreachable or busy worker are repeated.
        max_batch_bytes: the largest batch that is accepted from a worker.
        grace_s: added to the longest silence of a command: the worker's own heartbeat can name the rank that hangs.
    """

    progress_timeout_s: float = 600.0
    reconnect_timeout_s: float = 5.0
    max_batch_bytes: int = 4 << 30
    grace_s: float = 0.0

    @property
    def silence_s(self) -> float:
        """The longest time, in seconds, that a running command may go without sending an event."""
        return self.progress_timeout_s + self.grace_s


DEFAULT_LIMITS = Limits()


@dataclass(frozen=True)
class CommandReply:
    """A worker's reply to one command, with the time that the engine spent on the command.

    Attributes:
        result: the result as the worker has sent it.
        started_s, finished_s: when the engine worked, between request and reply; controller's clock, unix seconds.
    """

    result: worker_pb2.CommandResult
    started_s: float
    finished_s: float

    @property
    def timings_s(self) -> Mapping[str, float]:
        """The durations in seconds that the worker reports as metrics timing_s/<name>, keyed by <name>."""
        prefix = "timing_s/"
        return {name.removeprefix(prefix): s for name, s in self.result.metrics.items() if name.startswith(prefix)}

    def span(self, pool: str, name: str, step: int) -> Span:
        """Returns the engine's work on the command as a `Span` of the timeline."""
        return Span(pool, name, step, self.started_s, self.finished_s)

    def spans(self, pool: str, name: str, step: int, parts: Parts = ()) -> list[Span]:
        """Returns the span of the engine's work, and that of the weight sync by which it began, if one took time."""
        whole = self.span(pool, name, step)
        sync_s = self.timings_s.get("update_weights", 0.0)
        end_s = min(self.started_s + sync_s, self.finished_s)
        sync = [replace(whole, name="update_weights", finished_s=end_s)] if sync_s >= _SHORTEST_SYNC_S else []
        return [replace(whole, parts=parts), *sync]


class ReconnectDeadline:
    """Decides how long calls to an unreachable or busy worker are repeated.

    The deadline is `timeout_s` seconds after the first failed call since the worker last answered.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._ends_at: float | None = None

    def clear(self) -> None:
        """Records that the worker has answered: the next failed call starts the timeout anew."""
        self._ends_at = None

    def has_passed(self) -> bool:
        """Records a failed call; returns True if calls have failed for the whole timeout without any answer."""
        now = time.monotonic()
        if self._ends_at is None:
            self._ends_at = now + self._timeout_s
        return now >= self._ends_at


async def repeat_until_answered(attempt: Callable[[], Awaitable[T]], deadline: ReconnectDeadline, place: Place) -> T:
    """Calls a worker and returns the answer; repeats the call to an unreachable or busy worker until the deadline.

    The pauses between calls to a busy worker grow. The call must be one that may be made twice: a read, or a command
    with a request id.

    Raises:
        WireError: the worker answered with an error, or the last attempt did not reach the worker.
    """
    is_repeated = False
    pause_s = _RETRY_PAUSE_S / 2
    while True:
        try:
            return await attempt()
        except grpc.RpcError as failed:
            error = error_from_rpc(failed, place)
            if isinstance(error, Unavailable):
                error.at(Place(rank=0))  # the rank that does not answer
            if not isinstance(error, Unavailable | DeadlineExceeded | Busy) or deadline.has_passed():
                raise error from failed
            pause_s = min(2.0 * pause_s, _MAX_BUSY_PAUSE_S) if isinstance(error, Busy) else _RETRY_PAUSE_S
            if not is_repeated:
                log.warning("calling again: %s", error)
            is_repeated = True
        except WireError as error:
            raise error.at(place)  # noqa: B904 - the same error
        await asyncio.sleep(pause_s)


@dataclass
class RunningCommand:
    """One command that was sent to a worker and has no reply yet.

    Attributes:
        place: role, step and method of the command, for error messages.
        clock_offset_s: the worker's clock minus the controller's, in seconds.
        on_event: called with every event that is neither progress nor the result, perhaps several times.
        last: the newest progress event.
    """

    place: Place
    limits: Limits
    clock_offset_s: float
    get_status: Callable[[], Awaitable[worker_pb2.GetStatusResponse]]
    on_progress: ProgressCallback
    on_event: EventCallback
    last: worker_pb2.Progress | None = None

    async def run(self, call: Callable[[], Any]) -> CommandReply:
        """Sends the command (again after a lost connection) and reads the events that `call` streams, until the reply.

        Raises:
            DeadlineExceeded: there was no progress for too long; the error has the last phase.
            WireError: the worker answered with an error, or the last attempt did not reach the worker.
        """
        deadline = ReconnectDeadline(self.limits.reconnect_timeout_s)
        self._hit(".begin")
        sent_s = unix_s()
        try:
            result = await repeat_until_answered(lambda: self._follow(call(), deadline), deadline, self.place)
        except Unavailable as error:
            last = self.last or worker_pb2.Progress()
            reached = f" (its last progress was {last.done} of {last.total})" if last.total else ""
            raise Unavailable(f"{error.message}{reached}", error.place.or_else(Place(phase=last.phase))) from error
        self._hit(".replied")
        return CommandReply(result, *_on_our_clock(result.engine_time, self.clock_offset_s, sent_s, unix_s()))

    @property
    def _phase(self) -> str:
        return self.last.phase if self.last is not None else ""

    def _hit(self, moment: str = "") -> None:
        failpoints.hit(f"{self.place.role}.{failpoints.point_of(self.place.method)}{moment}", self.place.step)

    async def _follow(self, call: Any, deadline: ReconnectDeadline) -> worker_pb2.CommandResult:
        """Reads a command's events up to the result, which it returns. If cancelled, the worker's command continues."""
        status: worker_pb2.GetStatusResponse | None = None
        reading = asyncio.ensure_future(call.read())
        try:
            while True:
                done, _ = await asyncio.wait({reading}, timeout=self.limits.silence_s)
                if not done:
                    status = await self._check_silence(status)
                    continue
                if (event := reading.result()) is _END_OF_STREAM:
                    raise Internal("the worker ended the command without a result", Place(phase=self._phase))
                deadline.clear()
                match event.WhichOneof("event"):
                    case "result":
                        result: worker_pb2.CommandResult = event.result
                        return result
                    case "progress":
                        self.last = event.progress
                        self._hit()
                        self.on_progress(self.place.role, self.place.method, event.progress)
                    case _:
                        self.on_event(event)
                reading = asyncio.ensure_future(call.read())
        finally:
            if not call.done():
                call.cancel()
            with suppress(asyncio.CancelledError, grpc.RpcError):
                await reading

    async def _check_silence(self, before: worker_pb2.GetStatusResponse | None) -> worker_pb2.GetStatusResponse:
        """Checks that a command that sends no events is not stuck; returns the worker's status after this silence.

        `before` is the status after the previous silence. A command that is queued, or waits for the disk, is silent,
        too. It may wait as long as the worker works on other commands, that is, as long as the status changes between
        silences.

        Raises:
            DeadlineExceeded: the worker does not answer, its status does not change, or it runs this command without
                progress.
        """
        now: worker_pb2.GetStatusResponse | None = None
        with suppress(WireError):
            now = await self.get_status()
        if now is not None and now != before and (now.running_method, now.progress) != (self.place.method, self.last):
            return now
        reached = f"; it had reached {self.last.done} of {self.last.total}" if self.last else " and has not begun"
        unanswered = ", and rank 0 does not answer" if now is None else ""
        message = f"the command made no progress for {self.limits.silence_s:g} s{reached}{unanswered}"
        raise DeadlineExceeded(message, Place(phase=self._phase, rank=0 if now is None else None))


def clock_offset_s(worker_s: float, sent_s: float, answered_s: float) -> float:
    """Estimates a worker's clock minus the controller's, in seconds, from the time in the worker's answer to a request.

    The worker reads its clock between request and answer. If the worker's time lies between the controller's times of
    the request and the answer, the clocks may be equal, and the offset is 0. On one machine the times of
    controller and worker can then be compared exactly, however long the answer took.
    """
    if sent_s <= worker_s <= answered_s:
        return 0.0
    return worker_s - (sent_s + answered_s) / 2


def _on_our_clock(
    engine: worker_pb2.EngineTime, clock_offset_s: float, sent_s: float, answered_s: float
) -> tuple[float, float]:
    """Converts the start and the end of an engine's work to the controller's clock, in unix seconds.

    The offset is exact to half a round trip only. The times are moved between request and reply, so that calls made one
    after the other never seem to overlap.
    """
    started_s = engine.started_unix_ns / 1e9 - clock_offset_s
    finished_s = engine.finished_unix_ns / 1e9 - clock_offset_s
    shift_s = max(sent_s - started_s, 0.0) or min(answered_s - finished_s, 0.0)
    return max(started_s + shift_s, sent_s), min(finished_s + shift_s, answered_s)
