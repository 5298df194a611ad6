"""The limit on concurrent calls."""

from __future__ import annotations

import asyncio

import pytest

from services.runtime.rpc.limits import CallLimit
from splitppo.rpc.errors import Busy


async def test_a_call_that_ends_makes_room_for_another() -> None:
    limit = CallLimit(2, "services.max_calls")
    async with limit.call(), limit.call():
        with pytest.raises(Busy, match=r"2 calls at a time \(services.max_calls\)"):
            async with limit.call():
                pass
    async with limit.call():
        pass


async def test_where_the_oldest_ends_only_the_oldest_does() -> None:
    limit = CallLimit(2, ends_oldest=True)

    async def call() -> None:
        async with limit.call():
            await asyncio.Event().wait()

    oldest, *newer = [asyncio.create_task(call()) for _ in range(3)]
    with pytest.raises(Busy, match="2 calls at a time, and newer ones came"):
        await oldest
    assert not any(task.done() for task in newer)
    for task in newer:
        task.cancel()
    await asyncio.wait(newer)


async def test_a_call_that_runs_into_a_timeout_of_its_own_keeps_its_error() -> None:
    with pytest.raises(TimeoutError, match="the disk"):
        async with CallLimit(1).call():
            raise TimeoutError("the disk")
