"""The schedules serial, gather and overlap, which decide only which calls of a step may run at the same time.

serial   every call after the other.
gather   independent calls overlap; both updates run at the same time, and the step waits for both.
overlap  like gather, but the next step waits for the critic's update only before it computes values.
"""

from collections.abc import Callable, Coroutine
from typing import Any

from controller.workers.concurrency import gather_calls
from splitppo.config import Schedule


async def run_calls(schedule: Schedule, *calls: Callable[[], Coroutine[Any, Any, Any]]) -> list[Any]:
    """Awaits independent coroutines, one by one (serial) or together (gather, overlap); returns results in order.

    The first call that fails cancels the others, and its own error is raised.
    """
    if schedule == "serial":
        return [await call() for call in calls]
    return await gather_calls(*(call() for call in calls))
