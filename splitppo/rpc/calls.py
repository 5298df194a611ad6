"""A client's calls: repeated while the worker cannot be reached, watched for progress while they run."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar

import grpc
import grpc.aio

from splitppo.rpc.errors import DeadlineExceeded, Internal, Place, Unavailable, WireError, error_from_rpc
from splitppo.v1 import worker_pb2

log = logging.getLogger(__name__)
T = TypeVar("T")

_RETRY_PAUSE_S = 0.1
_END_OF_STREAM: Any = grpc.aio.EOF  # type: ignore[attr-defined]


class Patience:
    """How long a worker that does not answer is called again."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._ends_at: float | None = None

    def renew(self) -> None:
        """A sign of life: the next failure is the first one again."""
        self._ends_at = None

    def is_over(self) -> bool:
        """True when the failures since the last sign of life have lasted for the limit."""
        now = time.monotonic()
        if self._ends_at is None:
            self._ends_at = now + self._limit_s
        return now >= self._ends_at


async def repeat_until_answered(attempt: Callable[[], Awaitable[T]], patience: Patience, place: Place) -> T:
    """Makes a call, again after UNAVAILABLE and DEADLINE_EXCEEDED, until the worker answers or patience is over.

    Only for calls that may be made twice: reads, and commands that carry a request id.

    Raises:
        WireError: what the worker answered, or the last failure to reach it.
    """
    is_repeated = False
    while True:
        try:
            return await attempt()
        except grpc.RpcError as failed:
            error = error_from_rpc(failed, place)
            if not isinstance(error, Unavailable | DeadlineExceeded) or patience.is_over():
                raise error from failed
            if not is_repeated:
                log.warning("calling again: %s", error)
            is_repeated = True
        except WireError as error:
            raise error.at(place)  # noqa: B904 - the same error
        await asyncio.sleep(_RETRY_PAUSE_S)


async def follow_command(
    call: grpc.aio.UnaryStreamCall[Any, worker_pb2.CommandEvent],
    method: str,
    *,
    on_progress: Callable[[worker_pb2.Progress], None],
    on_part: Callable[[worker_pb2.PartReady], None],
    silence_s: float,
    get_status: Callable[[], Awaitable[worker_pb2.GetStatusResponse]],
) -> worker_pb2.CommandResult:
    """Reads a command's events up to its result.

    Args:
        call: the running call; it is cancelled if this coroutine ends early (the worker's command goes on).
        method: name of the command's RPC.
        on_progress: takes every progress event.
        on_part: takes every part that is ready.
        silence_s: longest time without an event. A command that waits in the mailbox, or for the disk, is silent,
            too: it may wait on while the worker works on others, that is, while its status changes between silences.
        get_status: the worker's status.

    Raises:
        DeadlineExceeded: no progress for too long, with the last phase.
        grpc.RpcError: the call failed.
        Internal: the stream ended without a result.
    """
    last: worker_pb2.Progress | None = None
    seen: worker_pb2.GetStatusResponse | None = None
    reading: asyncio.Future[Any] = asyncio.ensure_future(call.read())
    try:
        while True:
            done, _ = await asyncio.wait({reading}, timeout=silence_s)
            if not done:
                now = await _status_or_none(get_status)
                hangs = now is not None and (now.running_method, now.progress) == (method, last)
                if now is None or now == seen or hangs:
                    raise _silence(last, silence_s, is_mute=now is None)
                seen = now
                continue
            event = reading.result()
            if event is _END_OF_STREAM:
                raise Internal("the worker ended the command without a result", _phase(last))
            if event.WhichOneof("event") == "result":
                result: worker_pb2.CommandResult = event.result
                return result
            if event.WhichOneof("event") == "part":
                on_part(event.part)
            else:
                last = event.progress
                on_progress(event.progress)
            reading = asyncio.ensure_future(call.read())
    finally:
        await _give_up(call, reading)


async def _status_or_none(
    get_status: Callable[[], Awaitable[worker_pb2.GetStatusResponse]],
) -> worker_pb2.GetStatusResponse | None:
    with suppress(WireError):
        return await get_status()
    return None


def _silence(last: worker_pb2.Progress | None, silence_s: float, *, is_mute: bool) -> DeadlineExceeded:
    reached = f"; it had reached {last.done} of {last.total}" if last is not None else " and has not begun"
    mute = ", and rank 0 does not answer" if is_mute else ""
    place = replace(_phase(last), rank=0 if is_mute else None)
    return DeadlineExceeded(f"the command made no progress for {silence_s:g} s{reached}{mute}", place)


def unreachable(error: Unavailable, last: worker_pb2.Progress) -> Unavailable:
    """What a command ends with whose worker cannot be reached any more: it is rank 0 that does not answer.

    Args:
        error: of the last call.
        last: progress of the command; empty if there was none.
    """
    reached = f" (its last progress was {last.done} of {last.total})" if last.total else ""
    return Unavailable(f"{error.message}{reached}", error.place.or_else(Place(rank=0, phase=last.phase)))


def _phase(last: worker_pb2.Progress | None) -> Place:
    return Place(phase=last.phase if last is not None else "")


async def _give_up(call: Any, reading: asyncio.Future[Any]) -> None:
    """Cancels a call that still runs, and takes the outcome of its last read."""
    if not call.done():
        call.cancel()
    with suppress(asyncio.CancelledError, grpc.RpcError):
        await reading
