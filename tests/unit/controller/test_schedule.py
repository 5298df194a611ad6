"""Calls that may run at the same time, and calls that fail."""

from __future__ import annotations

import asyncio

import pytest

from controller.schedule import run_calls
from splitppo.config import Schedule

SCHEDULES: list[Schedule] = ["serial", "gather", "overlap"]


@pytest.mark.parametrize("schedule", SCHEDULES)
async def test_results_come_in_the_order_of_the_calls(schedule: Schedule) -> None:
    first_ends = asyncio.Event()

    async def slow() -> int:
        if schedule != "serial":
            await first_ends.wait()
        return 1

    async def fast() -> int:
        first_ends.set()
        return 2

    assert await run_calls(schedule, slow, fast) == [1, 2]


@pytest.mark.parametrize("schedule", SCHEDULES)
async def test_no_calls_give_no_results(schedule: Schedule) -> None:
    assert await run_calls(schedule) == []


async def test_serial_begins_a_call_when_the_one_before_has_ended() -> None:
    running: list[int] = []

    async def call(number: int) -> None:
        assert not running
        running.append(number)
        await asyncio.sleep(0)
        running.remove(number)

    await run_calls("serial", lambda: call(1), lambda: call(2), lambda: call(3))


@pytest.mark.parametrize("schedule", ["gather", "overlap"])
async def test_the_other_schedules_run_calls_at_the_same_time(schedule: Schedule) -> None:
    barrier = asyncio.Barrier(3)
    async with asyncio.timeout(20):
        assert sorted(await run_calls(schedule, barrier.wait, barrier.wait, barrier.wait)) == [0, 1, 2]


@pytest.mark.parametrize("schedule", ["gather", "overlap"])
async def test_a_failure_cancels_the_other_calls_and_is_raised_as_it_is(schedule: Schedule) -> None:
    cancelled = []

    async def endless() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    async def fail() -> None:
        await asyncio.sleep(0)
        raise KeyError("the cause")

    with pytest.raises(KeyError, match="the cause"):
        await run_calls(schedule, endless, fail, endless)
    assert cancelled == [True, True]


async def test_serial_begins_no_call_after_a_failure() -> None:
    async def fail() -> None:
        raise KeyError("the cause")

    async def never() -> None:
        pytest.fail("must not begin")

    with pytest.raises(KeyError, match="the cause"):
        await run_calls("serial", fail, never)


@pytest.mark.parametrize("schedule", SCHEDULES)
async def test_a_cancelled_caller_cancels_its_calls(schedule: Schedule) -> None:
    begun, cancelled = asyncio.Event(), asyncio.Event()

    async def endless() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    caller = asyncio.create_task(run_calls(schedule, endless))
    await begun.wait()
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert cancelled.is_set()
