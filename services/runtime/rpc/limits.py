"""Limits the open calls of a gRPC server; beyond the limit callers get RESOURCE_EXHAUSTED."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from splitppo.rpc.errors import Busy, WireError


@asynccontextmanager
async def refusing_when(end: asyncio.Timeout, refusal: WireError) -> AsyncIterator[None]:
    """Cancels the `with` block and raises `refusal` when the timeout `end` expires; other TimeoutErrors pass."""
    try:
        async with end:
            yield
    except TimeoutError as error:
        if not end.expired():
            raise
        raise refusal from error


class CallLimit:
    """Limits how many gRPC calls are open at a time, each from arrival to end. Not thread-safe.

    Args:
        max_calls: how many calls may be open at a time.
        key: the key of the configuration with this limit, for the error sentence; empty for a fixed limit.
        ends_oldest: a call over the limit ends the oldest call, so that strangers cannot keep others out.
    """

    def __init__(self, max_calls: int, key: str = "", *, ends_oldest: bool = False) -> None:
        self._max_calls = max_calls
        self._refusal = f"the service answers {max_calls} calls at a time{key and f' ({key})'}"
        self._ends_oldest = ends_oldest
        self._open: list[asyncio.Timeout] = []

    @asynccontextmanager
    async def call(self) -> AsyncIterator[None]:
        """Counts a call as open in the `with` block; Busy if the limit is reached, or a newer call ends this one."""
        if len(self._open) >= self._max_calls:
            if not self._ends_oldest:
                raise Busy(self._refusal)
            self._open.pop(0).reschedule(0.0)
        end = asyncio.timeout(None)
        async with refusing_when(end, Busy(f"{self._refusal}, and newer ones came")):
            self._open.append(end)
            try:
                yield
            finally:
                if end in self._open:
                    self._open.remove(end)
