"""Which calls of a step may run at the same time: the only thing in which the schedules differ.

serial   every call after the other.
gather   independent calls overlap; both updates run concurrently and are joined.
overlap  as gather, but the critic's update is joined where it is first needed: before the next step's values.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from splitppo.config.schema import Schedule

Call = Callable[[], Awaitable[Any]]

_OWN_WORDS_S = 2.0


async def run_calls(schedule: Schedule, *calls: Call) -> list[Any]:
    """Runs independent calls and returns their results in order; at the same time unless the schedule is serial.

    The first call that fails cancels the others, and its error is raised as it is.
    """
    if schedule == "serial":
        return [await call() for call in calls]
    return await gather_calls(*(_awaited(call) for call in calls))


async def gather_calls(*calls: Coroutine[Any, Any, Any]) -> list[Any]:
    """Runs calls at the same time and returns their results in order.

    The first one that fails cancels the others, and its error is raised as it is.
    """
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(call) for call in calls]
    except BaseExceptionGroup as failures:
        raise first_error(failures) from None
    return [task.result() for task in tasks]


async def unless(
    alarm: Coroutine[Any, Any, Any], work: Coroutine[Any, Any, Any], *, own_words_s: float = _OWN_WORDS_S
) -> None:
    """Does the work, unless the alarm, which ends by raising only, is raised first.

    The work then has `own_words_s` seconds to say by itself, and better, what has happened.
    """
    working, watching = asyncio.create_task(work), asyncio.create_task(alarm)
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            await asyncio.wait({working}, timeout=own_words_s)
        (working if working.done() else watching).result()
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _awaited(call: Call) -> Any:
    return await call()


def first_error(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first leaf of an exception group."""
    error: BaseException = failures
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
