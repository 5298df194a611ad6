"""Recoveries of a run: their causes, their number, and failures after which the update is only sent again."""

from __future__ import annotations

from typing import Any

import pytest

from controller.workers.local_group import GroupFailed
from controller.workers.recovery import MAX_REPLAYS, RestartBudget, ends_by_restart, replay_if_clean
from splitppo.rpc.errors import (
    DeadlineExceeded,
    Dirty,
    Internal,
    InvalidArgument,
    OutOfMemory,
    PeerDied,
    StaleEpoch,
    Unavailable,
)
from splitppo.v1 import worker_pb2


def test_pauses_double_until_the_budget_is_spent() -> None:
    budget = RestartBudget(4, 1.0)
    assert [budget.take(2) for _ in range(4)] == [1.0, 2.0, 4.0, 8.0]
    assert budget.take(2) == "services.max_restarts (4) recoveries without a new step are spent"


def test_a_step_that_is_new_starts_the_count_afresh_and_a_repeated_one_does_not() -> None:
    budget = RestartBudget(2, 1.0)
    assert [budget.take(5), budget.take(3), budget.take(6), budget.take(6)] == [1, 2, 1, 2]
    assert isinstance(budget.take(6), str)


def test_a_second_kill_for_want_of_memory_ends_the_run_unless_there_was_a_new_step_in_between() -> None:
    budget = RestartBudget(20, 1.0)
    kills = [budget.take(step, is_oom_kill=True) for step in (5, 6, 9)]
    assert kills == [1.0, 1.0, 1.0]
    assert budget.take(2) == 2.0
    assert "second time without a new step" in str(budget.take(9, is_oom_kill=True))


def test_a_pause_has_an_end() -> None:
    budget = RestartBudget(20, 1.0)
    assert max(float(budget.take(1)) for _ in range(20)) == 60.0


def test_without_restarts_nothing_is_recovered() -> None:
    assert isinstance(RestartBudget(0, 1.0).take(1), str)


@pytest.mark.parametrize("error", [Unavailable(""), PeerDied(""), DeadlineExceeded(""), Dirty("")])
def test_lost_hanging_and_dirty_groups_are_recovered_from(error: Exception) -> None:
    assert ends_by_restart(error, was_connected=True, has_lost_group=False)


@pytest.mark.parametrize("error", [InvalidArgument(""), StaleEpoch(""), Internal(""), ValueError("")])
def test_mistakes_bugs_and_newer_controllers_end_the_run(error: Exception) -> None:
    assert not ends_by_restart(error, was_connected=True, has_lost_group=False)


@pytest.mark.parametrize(
    ("was_connected", "was_killed", "expected"), [(False, False, False), (False, True, True), (True, False, True)]
)
def test_a_group_that_fails_by_itself_at_the_first_start_is_not_tried_again(
    *, was_connected: bool, was_killed: bool, expected: bool
) -> None:
    failed = GroupFailed("", was_killed=was_killed)
    assert ends_by_restart(failed, was_connected=was_connected, has_lost_group=True) == expected


@pytest.mark.parametrize("was_connected", [False, True])
def test_input_that_is_refused_ends_the_run_unless_it_has_worked_before(*, was_connected: bool) -> None:
    refused = GroupFailed("the port is taken", is_bad_input=True)
    assert ends_by_restart(refused, was_connected=was_connected, has_lost_group=True) == was_connected


@pytest.mark.parametrize(
    ("error", "expected"), [(Internal("gloo"), True), (StaleEpoch("a newer one"), False), (ValueError("ours"), False)]
)
def test_whatever_a_group_says_that_has_lost_a_rank_is_recovered_from(error: Exception, *, expected: bool) -> None:
    assert ends_by_restart(error, was_connected=True, has_lost_group=True) == expected


class Client:
    """A worker that is in a state."""

    def __init__(self, *, dirty: bool = False, committed: int = 4) -> None:
        state = worker_pb2.WORKER_STATE_DIRTY if dirty else worker_pb2.WORKER_STATE_IDLE
        self._status = worker_pb2.GetStatusResponse(state=state, committed_step=committed)

    async def get_status(self) -> worker_pb2.GetStatusResponse:
        return self._status


class Attempts:
    """Fails as often as it is told."""

    def __init__(self, *errors: Exception) -> None:
        self._errors = list(errors)
        self.num_made = 0

    async def __call__(self) -> str:
        self.num_made += 1
        if self._errors:
            raise self._errors.pop(0)
        return "reply"


async def replayed(client: Any, attempts: Attempts) -> str:
    return await replay_if_clean(client, 4, attempts)


@pytest.mark.parametrize("error", [OutOfMemory("1 TiB"), Internal("broken")])
async def test_an_update_that_has_changed_nothing_is_sent_again(error: Exception) -> None:
    attempts = Attempts(error)
    assert await replayed(Client(), attempts) == "reply"
    assert attempts.num_made == 2


async def test_what_fails_each_time_is_given_up() -> None:
    attempts = Attempts(*(OutOfMemory("1 TiB") for _ in range(10)))
    with pytest.raises(OutOfMemory):
        await replayed(Client(), attempts)
    assert attempts.num_made == MAX_REPLAYS + 1


async def test_an_update_that_failed_half_way_is_dirty_and_not_sent_again() -> None:
    attempts = Attempts(Internal("broken"))
    with pytest.raises(Dirty, match="broken"):
        await replayed(Client(dirty=True), attempts)
    assert attempts.num_made == 1


async def test_a_lost_group_is_not_this_functions_business() -> None:
    attempts = Attempts(PeerDied("rank 1"))
    with pytest.raises(PeerDied):
        await replayed(Client(), attempts)
    assert attempts.num_made == 1


async def test_an_update_is_not_sent_to_a_worker_that_is_at_another_step() -> None:
    attempts = Attempts(Internal("broken"))
    with pytest.raises(Internal):
        await replayed(Client(committed=5), attempts)
    assert attempts.num_made == 1
