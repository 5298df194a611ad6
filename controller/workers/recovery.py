"""The rules by which a run recovers by itself, and how often: lost groups, updates that failed half-way."""

import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from controller.workers.client import WorkerClient
from controller.workers.launcher import GroupFailed
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
from splitppo.v1 import worker_pb2

log = logging.getLogger(__name__)
T = TypeVar("T")

# The group that such an error names has ended, hangs or cannot be reached: it is started again.
LOST_GROUP = (Unavailable, PeerDied, DeadlineExceeded)
# What ends with a new connection and the last common checkpoint on both sides.
RECOVERABLE = (*LOST_GROUP, NotIntroduced, Dirty)

MAX_BACKOFF_S = 60.0
MAX_REPLAYS = 2


class RestartBudget:
    """The recoveries that are left: `max_restarts` without progress, a step that was never done before, in between.

    The pause before the first of them is `backoff_s`; it doubles with each further one. There is one for a rank that
    the kernel killed for want of memory: it would need the same memory at the same place again.
    """

    def __init__(self, max_restarts: int, backoff_s: float) -> None:
        self._max_restarts = max_restarts
        self._backoff_s = backoff_s
        self._num_taken = self._num_oom_kills = 0
        self._best_step = 0

    def take(self, last_step: int, *, is_oom_kill: bool = False) -> float | str:
        """Takes one recovery after `last_step`: the pause before it in seconds, or why there is none left."""
        if last_step > self._best_step:
            self._best_step, self._num_taken, self._num_oom_kills = last_step, 0, 0
        self._num_oom_kills += is_oom_kill
        if self._num_oom_kills == 2:
            return (
                "that is the second time without a new step, and it would happen again: --check estimates the memory of"
                " each phase, docs/operations.md says what lowers it"
            )
        if self._num_taken == self._max_restarts:
            return f"services.max_restarts ({self._max_restarts}) recoveries without a new step are spent"
        self._num_taken += 1
        return min(self._backoff_s * 2.0 ** (self._num_taken - 1), MAX_BACKOFF_S)


def ends_by_restart(error: Exception, *, was_connected: bool, has_lost_group: bool) -> bool:
    """Returns True if the run can go on after an error of a group, from the last common checkpoint.

    Before all groups were connected only one that was killed is tried again: one that fails by itself, or refuses its
    input, will do so again. Later on the same input has worked before. Where a group was lost, what the others say of
    it may be any error.
    """
    if isinstance(error, GroupFailed):
        return was_connected or (error.was_killed and not error.is_bad_input)
    if isinstance(error, StaleEpoch):
        return False
    return isinstance(error, RECOVERABLE) or (has_lost_group and isinstance(error, WireError))


async def replay_if_clean(client: WorkerClient, base_step: int, attempt: Callable[[], Awaitable[T]]) -> T:
    """Makes an update, again if it failed before its first optimizer step and its group can go on.

    `attempt` sends the rows and the update, under the same request id each time; the other role is not disturbed.

    Raises:
        Dirty: it failed half-way; only a checkpoint brings the group back.
        WireError: it failed too often, or the group is lost.
    """
    for num_replays in range(MAX_REPLAYS + 1):
        try:
            return await attempt()
        except (OutOfMemory, Internal) as error:
            status = await client.get_status()
            if status.state == worker_pb2.WORKER_STATE_DIRTY:
                raise Dirty(error.message, error.place) from error
            takes_commands = status.state in (worker_pb2.WORKER_STATE_IDLE, worker_pb2.WORKER_STATE_BUSY)
            if num_replays == MAX_REPLAYS or not takes_commands or status.committed_step != base_step:
                raise
            log.warning("the update has changed nothing, sending it again: %s", error)
    raise AssertionError("unreachable")
