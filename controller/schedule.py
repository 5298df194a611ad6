"""Which calls of a step may run at the same time: the only thing in which the schedules differ.

serial   every call after the other.
gather   independent calls overlap; both updates run concurrently and are joined.
overlap  as gather, but the critic's update is joined where it is first needed: before the next step's values.
"""

from collections.abc import Callable, Coroutine
from typing import Any

from controller.workers.concurrency import gather_calls
from splitppo.config import Schedule


async def run_calls(schedule: Schedule, *calls: Callable[[], Coroutine[Any, Any, Any]]) -> list[Any]:
    """Runs independent calls and returns their results in order; at the same time unless the schedule is serial.

    The first call that fails cancels the others, and its error is raised as it is.
    """
    if schedule == "serial":
        return [await call() for call in calls]
    return await gather_calls(*(call() for call in calls))
