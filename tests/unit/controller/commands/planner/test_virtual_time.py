"""Virtual time: hours pass in no time, in the right order, and devices work on one command after the other."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any

import pytest

from controller.commands.planner.virtual_time import Devices, VirtualLoop


def run(work: Coroutine[Any, Any, Any]) -> Any:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)


def now_s() -> float:
    return asyncio.get_running_loop().time()


def test_days_pass_in_no_time_and_each_sleeper_wakes_at_its_own() -> None:
    async def wake(after_s: float) -> float:
        await asyncio.sleep(after_s)
        return now_s()

    async def all_awake() -> list[float]:
        return await asyncio.gather(*(wake(days * 86400.0) for days in (3, 1, 2)))

    began_s = time.perf_counter()
    assert run(all_awake()) == [3 * 86400.0, 86400.0, 2 * 86400.0]
    assert time.perf_counter() - began_s < 10.0


def test_what_is_given_to_a_thread_takes_no_time() -> None:
    async def work() -> tuple[int, float]:
        sleeping = asyncio.create_task(asyncio.sleep(1.0))
        found = await asyncio.to_thread(lambda: 7)
        at_s = now_s()
        await sleeping
        return found, at_s

    assert run(work()) == (7, 0.0)


def test_tasks_that_wait_for_each_other_end_with_an_error_and_not_never() -> None:
    async def wait() -> None:
        await asyncio.Event().wait()

    with pytest.raises(RuntimeError, match="every task waits for another one"):
        run(wait())


def test_a_pool_works_on_commands_in_the_order_of_their_arrival() -> None:
    async def ends_s() -> list[float]:
        devices = Devices()

        async def command(pool: str, seconds: float) -> float:
            await devices.work(pool, seconds)
            return now_s()

        ends = await asyncio.gather(command("a", 3.0), command("a", 1.0), command("b", 2.0))
        assert (devices.busy_s("a", 1.0, 10.0), devices.busy_s("b", 1.0, 10.0)) == (3.0, 1.0)
        return ends

    assert run(ends_s()) == [3.0, 4.0, 2.0]


def test_pools_slow_each_other_down_only_while_both_work() -> None:
    async def ends_s() -> list[float]:
        devices = Devices(slowed={"a", "b"}, slowdown=2.0)

        async def command(pool: str, *pieces_s: float) -> float:
            await devices.work(pool, *pieces_s)
            return now_s()

        return await asyncio.gather(command("a", 1.0, 2.0), command("b", 1.0), command("other", 5.0))

    # Until second 2 both do 1 s of work; then `a` has 2 s left, alone.
    assert run(ends_s()) == pytest.approx([4.0, 2.0, 5.0])


def test_a_command_tells_of_each_piece_when_it_is_done() -> None:
    async def told() -> list[tuple[int, float]]:
        found: list[tuple[int, float]] = []
        await Devices().work("a", 1.0, 2.5, on_piece=lambda piece: found.append((piece, now_s())))
        return found

    assert run(told()) == [(1, 1.0), (2, 3.5)]
