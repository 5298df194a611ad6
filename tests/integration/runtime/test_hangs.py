"""A rank that is frozen or stuck ends its group, and the caller learns which rank it was and where it was."""

from __future__ import annotations

import os
import signal

import pytest

from splitppo.rpc.errors import PeerDied
from tests.integration.runtime import toy
from tests.integration.runtime.client import error_of, experience, progress
from tests.integration.runtime.conftest import StartToy, Toy
from tests.support.groups import is_alive, wait_until

# Only what is frozen or stuck may be silent for so long, however busy the machine is.
LIMIT_S = 5.0


def blocked_update(toy_group: Toy, order: int) -> object:
    rows = {"prompts": [[order], [order]], "responses": [[1], [2]], "returns": [[1.0], [1.0]]}
    toy_group.client.put(experience(1), **rows)
    running = toy_group.client.update(1)
    assert progress(running).phase == "blocked"
    return running


def kill_stopped(group: Toy, rank: int) -> None:
    os.kill(group.group.pids[rank], signal.SIGKILL)  # else torchrun waits half a minute for it


def log_of(group: Toy, rank: int) -> str:
    return (group.run_dir / "logs" / f"critic_{rank}.log").read_text()


def test_a_frozen_rank_is_named_with_its_last_progress_and_ends_the_group(start_toy: StartToy) -> None:
    group = start_toy(2, progress_timeout_s=LIMIT_S)
    running = blocked_update(group, toy.BUSY)  # or this rank's own silence might be noticed first
    os.kill(group.group.pids[1], signal.SIGSTOP)
    error = error_of(running)
    assert isinstance(error, PeerDied)
    assert (error.place.role, error.place.rank, error.place.step, error.place.method) == ("critic", 1, 1, "Update")
    assert "rank 1 failed in step 1, Update (blocked): it hangs: it has given no sign of life" in str(error)
    assert "its last progress was 0 of 1" in str(error)
    kill_stopped(group, 1)
    assert group.group.wait_ended() != 0


@pytest.mark.extended
def test_a_rank_that_freezes_while_there_is_nothing_to_do_ends_the_group(start_toy: StartToy) -> None:
    group = start_toy(2, progress_timeout_s=LIMIT_S)
    os.kill(group.group.pids[1], signal.SIGSTOP)
    wait_until(lambda: not is_alive(group.group.pids[0]), what="the end of rank 0")
    assert "rank 1 failed: it hangs: it has given no sign of life" in log_of(group, 0)
    kill_stopped(group, 1)
    assert group.group.wait_ended() != 0


def test_a_frozen_rank_0_ends_the_others(start_toy: StartToy) -> None:
    group = start_toy(2, progress_timeout_s=LIMIT_S)
    blocked_update(group, toy.BUSY)
    os.kill(group.group.pids[0], signal.SIGSTOP)
    wait_until(lambda: not is_alive(group.group.pids[1]), what="the end of rank 1")
    assert "failed in rank 0, step 1, Update (blocked): it has given no sign of life" in log_of(group, 1)
    kill_stopped(group, 0)
    assert group.group.wait_ended() != 0


def test_a_command_without_progress_ends_the_group_within_its_limit(start_toy: StartToy) -> None:
    group = start_toy(1, progress_timeout_s=LIMIT_S)
    error = error_of(blocked_update(group, toy.BLOCK))
    assert isinstance(error, PeerDied)
    assert "rank 0 failed in step 1, Update (blocked): it hangs: no progress for" in str(error)
    assert group.group.wait_ended() != 0
