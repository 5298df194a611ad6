"""Limits of a server: the number of open calls, the size of a request. Beyond them it answers RESOURCE_EXHAUSTED."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from splitppo.rpc.errors import Busy, WireError

# Requests other than batches contain ids, numbers and the names of columns.
MAX_REQUEST_BYTES = 64 << 10


@asynccontextmanager
async def refusing_when(end: asyncio.Timeout, refusal: WireError) -> AsyncIterator[None]:
    """Ends the block with `refusal` when the timeout `end` expires; the block's own TimeoutError stays as it is."""
    try:
        async with end:
            yield
    except TimeoutError as error:
        if not end.expired():
            raise
        raise refusal from error


class CallLimit:
    """Counts calls from their arrival to their end. For one event loop.

    Args:
        max_calls: how many calls may be open.
        key: the key of the configuration with this limit, for the refusal; empty if there is none.
        ends_oldest: one call more ends the oldest one, so that strangers cannot keep others out.
    """

    def __init__(self, max_calls: int, key: str = "", *, ends_oldest: bool = False) -> None:
        self._max_calls = max_calls
        self._refusal = f"the service answers {max_calls} calls at a time{key and f' ({key})'}"
        self._ends_oldest = ends_oldest
        self._open: list[asyncio.Timeout] = []

    @asynccontextmanager
    async def call(self) -> AsyncIterator[None]:
        """Counts a call while the block runs; Busy if there is no room for it, or another call takes its place."""
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
