"""Decides after which errors of worker groups a run goes on, how often, and when a failed update is repeated."""

import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from controller.workers.clients import WorkerClient
from controller.workers.local_group import GroupFailed
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

# The group that such an error names has ended, hangs or cannot be reached, and is started again.
LOST_GROUP = (Unavailable, PeerDied, DeadlineExceeded)
# After such an error the run goes on with a new connection, and both roles with their last common checkpoint.
RECOVERABLE = (*LOST_GROUP, NotIntroduced, Dirty)

MAX_BACKOFF_S = 60.0
MAX_REPLAYS = 2


class RestartBudget:
    """Limits the recoveries of a run to `max_restarts` in a row that bring no step that was never done before.

    The pause before the first recovery is `backoff_s` seconds; the pause doubles with each further one. After the
    kernel has killed a rank because memory ran out, there is only one recovery: the rank would need the same memory
    again.
    """

    def __init__(self, max_restarts: int, backoff_s: float) -> None:
        self._max_restarts = max_restarts
        self._backoff_s = backoff_s
        self._num_taken = self._num_oom_kills = 0
        self._best_step = 0

    def take(self, last_step: int, *, is_oom_kill: bool = False) -> float | str:
        """Counts a recovery after `last_step`; returns the pause before it in seconds, or why it is not allowed."""
        if last_step > self._best_step:
            self._best_step = last_step
            self._num_taken = 0
            self._num_oom_kills = 0
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
    """Returns True if the run can go on after a group's error: by a restart from the last checkpoint of all roles.

    Before all groups were connected once, only a group that was killed is started again: a group that fails by itself
    would fail again. Afterwards every failed group is started again, because its input has worked before. After the
    loss of a group, the error may come from another group, and may be any WireError.
    """
    if isinstance(error, GroupFailed):
        return was_connected or (error.was_killed and not error.is_bad_input)
    if isinstance(error, StaleEpoch):
        return False
    return isinstance(error, RECOVERABLE) or (has_lost_group and isinstance(error, WireError))


async def replay_if_clean(client: WorkerClient, base_step: int, attempt: Callable[[], Awaitable[T]]) -> T:
    """Makes an update; repeats it if it failed before its first optimizer step and the group still takes commands.

    `attempt` sends the rows and the update, under the same request id each time. The other role is not disturbed.

    Raises:
        Dirty: the update failed after an optimizer step; only a checkpoint restores the group.
        WireError: the update failed too often, or the group is lost.
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
