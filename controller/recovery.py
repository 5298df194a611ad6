"""When a run recovers by itself, and how often: lost groups, updates that failed half-way."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from controller.clients import WorkerClient
from controller.launcher import GroupFailed
from splitppo.rpc.errors import (
    DeadlineExceeded,
    Dirty,
    Internal,
    NotIntroduced,
    OutOfMemory,
    PeerDied,
    StaleEpoch,
    Unavailable,
    WireError,
)

log = logging.getLogger(__name__)
T = TypeVar("T")

# The group that such an error names has ended, hangs or cannot be reached: it is started again.
LOST_GROUP = (Unavailable, PeerDied, DeadlineExceeded)
# What ends with a new connection and the last common checkpoint on both sides.
RECOVERABLE = (*LOST_GROUP, NotIntroduced, Dirty)

MAX_BACKOFF_S = 60.0
MAX_REPLAYS = 2


class RestartBudget:
    """How many recoveries are left. A step that was never done before is progress: it starts the count afresh.

    Args:
        max_restarts: without progress in between.
        backoff_s: pause before the first of them; it doubles with each further one.
    """

    def __init__(self, max_restarts: int, backoff_s: float) -> None:
        self._max_restarts = max_restarts
        self._backoff_s = backoff_s
        self._num_taken = 0
        self._best_step = 0

    def take(self, last_step: int) -> float | None:
        """Takes one recovery; returns the pause before it in seconds, None if there is none left.

        Args:
            last_step: the last step that was done before the failure.
        """
        if last_step > self._best_step:
            self._best_step, self._num_taken = last_step, 0
        if self._num_taken == self._max_restarts:
            return None
        self._num_taken += 1
        return min(self._backoff_s * 2.0 ** (self._num_taken - 1), MAX_BACKOFF_S)


def ends_by_restart(error: Exception, *, was_connected: bool, has_lost_group: bool) -> bool:
    """Whether the run can go on after an error of a group, from the last common checkpoint.

    Args:
        error: of any kind.
        was_connected: whether all groups have answered before. At the first start only a group that was killed is
            tried again: one that fails by itself, or refuses its input, will do so again. Later on the same input has
            worked before.
        has_lost_group: whether a rank has ended meanwhile. What the others say of it may be any error.
    """
    if isinstance(error, GroupFailed):
        return was_connected or (error.was_killed and not error.is_bad_input)
    if isinstance(error, StaleEpoch):
        return False
    return isinstance(error, RECOVERABLE) or (has_lost_group and isinstance(error, WireError))


async def replay_if_clean(client: WorkerClient, base_step: int, attempt: Callable[[], Awaitable[T]]) -> T:
    """Makes an update, again if it failed before its first optimizer step and its group can go on.

    The other role is not disturbed. What has touched the weights is dirty, and raised as such.

    Args:
        client: of the group that updates.
        base_step: committed there before the update.
        attempt: sends the rows and the update, under the same request id each time.

    Raises:
        Dirty: it failed half-way; only a checkpoint brings the group back.
        WireError: it failed too often, or the group is lost.
    """
    for num_replays in range(MAX_REPLAYS + 1):
        try:
            return await attempt()
        except (OutOfMemory, Internal) as error:
            if await client.is_dirty():
                raise Dirty(error.message, error.place) from error
            if num_replays == MAX_REPLAYS or not await client.is_clean_at(base_step):
                raise
            log.warning("the update has changed nothing, sending it again: %s", error)
    raise AssertionError("unreachable")
