"""The rank that is named when a group hangs."""

from __future__ import annotations

import subprocess
import sys
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist

from services.runtime.failures.device import DeviceState
from services.runtime.failures.heartbeat import Activity, Heartbeat, VitalSign
from services.runtime.failures.peer_watch import RankHangs
from splitppo.rpc.errors import Place
from tests.support.groups import PROJECT

UPDATE = Place(method="Update", step=3)


class Ended(Exception):
    """In place of the end of the process."""


class Failure:
    """A failure watch that remembers what it was told."""

    def __init__(self) -> None:
        self.error: Any = None
        self.place = Place()

    def end_group(self, error: BaseException, place: Place) -> None:
        self.error, self.place = error, place
        raise Ended


LIMIT_S = 60.0


class Ranks:
    """Heartbeats of a group, whose main threads, signs of life and clock the test controls."""

    def __init__(self, num_ranks: int, *, command_limit_s: float = 1000.0) -> None:
        self.now_s = 100.0
        self.store = dist.HashStore()
        self.failures = [Failure() for _ in range(num_ranks)]
        self.activities = [Activity(LIMIT_S, command_limit_s, lambda: self.now_s) for _ in range(num_ranks)]
        self.dogs: list[Heartbeat] = []
        self._commands = ExitStack()
        for rank in range(num_ranks):
            failure: Any = self.failures[rank]
            activity = self.activities[rank]
            self.dogs.append(
                Heartbeat(rank, num_ranks, self.store, activity, failure, limit_s=LIMIT_S, clock=lambda: self.now_s)
            )
        for activity in self.activities:
            activity.idle()

    def begin(self, place: Place) -> None:
        """All ranks begin a command, and do not end it."""
        for activity in self.activities:
            self._commands.enter_context(activity.command(place))

    def look(self, *ranks: int) -> None:
        for rank in ranks:
            self.dogs[rank].look()

    def look_for(self, seconds: int, *ranks: int) -> None:
        """These ranks look every second, the others are frozen."""
        for _ in range(seconds):
            self.now_s += 1.0
            self.look(*ranks)

    def verdict(self, *ranks: int) -> Failure:
        """Returns the failure after the time limit if only these ranks look for hangs."""
        self.look_for(int(LIMIT_S), *ranks)
        with pytest.raises(Ended):
            self.look_for(1, *ranks)
        return next(failure for failure in self.failures if failure.error is not None)


def test_ranks_that_have_nothing_to_do_or_make_progress_are_left_alone() -> None:
    ranks = Ranks(3, command_limit_s=5.0)
    with ranks.activities[0].command(UPDATE):
        for done in range(40):
            ranks.activities[0].progress(done, 40, "update")
            ranks.look_for(5, 1, 2, 0)
    assert [failure.error for failure in ranks.failures] == [None] * 3


def test_a_rank_without_a_sign_of_life_is_named_with_its_last_progress() -> None:
    ranks = Ranks(3)
    ranks.begin(UPDATE)
    for activity in ranks.activities:
        activity.progress(3, 8, "update")
    ranks.look(1, 2, 0)
    failure = ranks.verdict(2, 0)
    assert isinstance(failure.error, RankHangs)
    assert failure.place == Place(rank=1, method="Update", step=3, phase="update")
    assert "no sign of life for 61 s" in str(failure.error)
    assert "its last progress was 3 of 8" in str(failure.error)


def test_a_rank_whose_last_sign_is_of_an_earlier_step_is_named_with_the_step_that_all_are_in() -> None:
    ranks = Ranks(2)
    with ranks.activities[1].command(replace(UPDATE, step=2)):
        ranks.look(1, 0)
    ranks.begin(UPDATE)
    ranks.activities[0].progress(3, 8, "update")
    failure = ranks.verdict(0)
    assert failure.place == Place(rank=1, method="Update", step=3, phase="update")


def test_of_living_ranks_the_one_that_has_been_silent_longest_is_named() -> None:
    ranks = Ranks(2, command_limit_s=LIMIT_S)
    ranks.begin(UPDATE)
    ranks.look_for(1, 1, 0)
    ranks.activities[0].progress(1, 8, "update")
    failure = ranks.verdict(1, 0)
    assert failure.place.rank == 1
    assert "no progress" in str(failure.error)


def test_a_frozen_rank_0_is_noticed_by_the_others() -> None:
    ranks = Ranks(2)
    ranks.look(0, 1)
    failure = ranks.verdict(1)
    assert failure is ranks.failures[1]
    assert failure.place.rank == 0


def test_a_start_that_takes_too_long_ends_the_group() -> None:
    failure: Any = Failure()
    now_s = [0.0]
    activity = Activity(60.0, 1.0, lambda: now_s[0])
    dog = Heartbeat(0, 1, dist.HashStore(), activity, failure, limit_s=1000.0, clock=lambda: now_s[0])
    now_s[0] = 60.0
    dog.look()
    assert failure.error is None
    now_s[0] = 60.5
    with pytest.raises(Ended):
        dog.look()
    assert failure.place.phase == "start"


def test_ranks_that_do_not_find_each_other_give_up() -> None:
    code = """
import logging, threading
from services.runtime.failures.heartbeat import start_limit
logging.basicConfig()
with start_limit(60.0):
    pass
with start_limit(0.1):
    threading.Event().wait()
"""
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=PROJECT, capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.returncode == 1
    assert "the ranks have not found each other within 0.1 s (services.start_timeout_s)" in ended.stderr


def test_rank_0_knows_the_device_of_every_rank_and_how_long_it_has_been_silent() -> None:
    ranks = Ranks(2)
    ranks.dogs[1].device = lambda: DeviceState("H200", 3, 4)
    ranks.look(1, 0)
    ranks.look_for(7, 0)
    signs = ranks.dogs[0].vital_signs()
    assert signs == {0: VitalSign(DeviceState(), 0.0), 1: VitalSign(DeviceState("H200", 3, 4), 7.0)}
