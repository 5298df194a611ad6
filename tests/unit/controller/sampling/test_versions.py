"""Versions of the policy: the rollout group holds the version that a caller names, also after it was lost."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, NoReturn

import pytest

from controller.sampling.versions import HeldVersion, PublishedVersions
from controller.workers.command import CommandReply
from splitppo.config import ConfigError
from splitppo.rpc.errors import (
    DataLoss,
    Dirty,
    InvalidArgument,
    NotFound,
    PeerDied,
    Place,
    Unavailable,
    WireError,
    WrongStep,
)
from tests.support.call_log import CallLog
from tests.support.fake_rollout import FakeRollout
from tests.support.fake_services import FakeActor, make_config

GROUP: dict[str, Any] = {"services__rollout": {}}
STALE: dict[str, Any] = {"rollout__staleness": 1, "algorithm__rollout_correction__rollout_is": "token"}
PUBLISH, SYNC = "actor.publish_weights", "rollout.sync_weights"


def lost(role: str = "rollout") -> Unavailable:
    return Unavailable("the group is lost", Place(role=role))


class Group:
    """A rollout group and the versions that it can hold, what both groups were asked for, and what was recorded."""

    def __init__(self, run_dir: Path, **changes: Any) -> None:
        self.log = CallLog()
        self.actor, self.rollout = FakeActor(self.log), FakeRollout(self.log)
        self.config = make_config(run_dir, **{**GROUP, **changes})
        self.published = PublishedVersions(self.config, self.actor, has_reader=True)
        self.held = HeldVersion(self.config, self.rollout, self.published, restart=self.rollout.restart)
        self.replies: list[tuple[str, str]] = []

    @property
    def loads(self) -> list[tuple[str, int]]:
        """The versions that were published and loaded, in this order."""
        return [(name, version) for what, name, version in self.log.events if what == "begin"]

    def note(self, pool: str, name: str, _: CommandReply) -> None:
        self.replies.append((pool, name))

    async def hold(self, version: int) -> None:
        await self.held.hold(version, self.note)

    async def sample(self, version: int, *outcomes: WireError | str) -> str:
        """Makes one attempt after the other end in these ways."""
        left = list(outcomes)

        async def attempt() -> str:
            assert self.rollout.committed_step == version
            await asyncio.sleep(0)
            if isinstance(outcome := left.pop(0), WireError):
                raise outcome
            return outcome

        answer = await self.held.call(version, self.note, attempt)
        assert not left
        return answer

    def fails(self, name: str, *errors: WireError) -> None:
        """Makes the calls of this name raise these errors, one after the other."""
        left = list(errors)

        async def raise_next(_: int) -> None:
            if left:
                raise left.pop(0)

        self.log.hooks[name] = raise_next


@pytest.fixture
def group(tmp_path: Path) -> Group:
    return Group(tmp_path)


async def test_a_version_is_published_once_and_loaded_once_per_connection(group: Group) -> None:
    await group.hold(0)
    await group.hold(0)
    assert group.loads == [(PUBLISH, 0), (SYNC, 0)]
    assert group.replies == [("actor", "publish"), ("rollout", "sync")]
    await group.rollout.restart(lost())
    await group.hold(0)
    assert group.loads[2:] == [(SYNC, 0)]


async def test_the_named_version_is_loaded_although_a_newer_one_is_published(group: Group) -> None:
    await group.hold(0)
    group.actor.committed_step = 1
    await group.published.publish(1, group.note)
    await group.rollout.restart(lost())
    await group.hold(0)
    assert group.rollout.committed_step == 0
    await group.hold(1)
    await group.hold(0)
    assert group.loads == [(PUBLISH, 0), (SYNC, 0), (PUBLISH, 1), (SYNC, 0), (SYNC, 1), (SYNC, 0)]


@pytest.mark.parametrize(
    ("changes", "published"), [({}, [(0, 0), (3, 3)]), (STALE, [(0, 0), (3, 2)])], ids=["staleness 0", "staleness 1"]
)
async def test_the_version_before_stays_as_long_as_it_may_be_needed(
    tmp_path: Path, changes: dict[str, Any], published: list[tuple[int, int]]
) -> None:
    group = Group(tmp_path, **changes)
    await group.hold(0)
    group.actor.committed_step = 3
    await group.hold(3)
    assert group.actor.published == published


async def test_without_a_rollout_group_nothing_is_published(tmp_path: Path) -> None:
    actor = FakeActor(CallLog())
    published = PublishedVersions(make_config(tmp_path), actor, has_reader=False)
    await published.publish(0, lambda *_: None)
    await published.publish_once(0, lambda *_: None)
    assert actor.published == []


async def test_a_lost_group_is_started_again_and_asked_again(group: Group) -> None:
    assert await group.sample(0, lost(), PeerDied("", Place(role="rollout", rank=1)), "answer") == "answer"
    assert len(group.rollout.restarts) == 2
    assert group.loads == [(PUBLISH, 0), *[(SYNC, 0)] * 3]


async def test_a_group_that_is_lost_while_it_loads_is_started_again(group: Group) -> None:
    group.fails(SYNC, lost())
    assert await group.sample(0, "answer") == "answer"
    assert group.loads == [(PUBLISH, 0), *[(SYNC, 0)] * 2]


async def test_a_group_that_has_ended_is_noticed_while_nothing_fails(tmp_path: Path) -> None:
    group = Group(tmp_path)
    rollout, has_ended = group.rollout, asyncio.Event()
    has_ended.set()

    async def watch() -> NoReturn:
        await has_ended.wait()
        raise lost()

    async def restart(error: Exception) -> None:
        has_ended.clear()
        await rollout.restart(error)

    async def attempt() -> str:
        if not rollout.restarts:
            await asyncio.Event().wait()
        return "answer"

    held = HeldVersion(group.config, rollout, group.published, watch=watch, restart=restart)
    assert await held.call(0, group.note, attempt) == "answer"
    assert len(rollout.restarts) == 1


async def test_callers_that_lose_the_group_together_restart_it_once(group: Group) -> None:
    barrier = asyncio.Barrier(3)
    losses = [lost() for _ in range(3)]

    async def attempt() -> int:
        if losses:
            error = losses.pop()
            await barrier.wait()
            raise error
        return group.rollout.committed_step

    answers = await asyncio.gather(*(group.held.call(0, group.note, attempt) for _ in range(3)))
    assert answers == [0, 0, 0]
    assert len(group.rollout.restarts) == 1
    assert group.loads == [(PUBLISH, 0), *[(SYNC, 0)] * 2]


@pytest.mark.parametrize("error", [lost("actor"), InvalidArgument("", Place(role="rollout")), Dirty("")])
async def test_other_errors_and_those_of_other_groups_are_the_callers(group: Group, error: WireError) -> None:
    with pytest.raises(type(error)) as raised:
        await group.sample(0, error)
    assert raised.value is error
    assert group.rollout.restarts == []


async def test_the_loss_of_the_actor_while_it_publishes_is_the_callers(group: Group) -> None:
    group.fails(PUBLISH, error := lost("actor"))
    with pytest.raises(Unavailable) as raised:
        await group.sample(0, "answer")
    assert raised.value is error


async def test_a_restart_that_is_not_allowed_ends_the_call(tmp_path: Path) -> None:
    group = Group(tmp_path)
    held = HeldVersion(group.config, group.rollout, group.published)

    async def attempt() -> None:
        raise lost()

    with pytest.raises(Unavailable):
        await held.call(0, group.note, attempt)


async def test_a_damaged_version_is_published_once_more(group: Group) -> None:
    group.fails(SYNC, DataLoss("a bit is wrong"))
    await group.hold(0)
    assert group.loads == [(PUBLISH, 0), (SYNC, 0)] * 2
    assert group.rollout.committed_step == 0


@pytest.mark.parametrize("is_later", [False, True], ids=["damaged again", "the actor is at a later step"])
async def test_a_version_that_stays_damaged_sends_all_groups_back_to_their_checkpoint(
    group: Group, *, is_later: bool
) -> None:
    await group.published.publish(0, group.note)
    group.fails(SYNC, DataLoss("a bit is wrong"), DataLoss("again"))
    if is_later:
        group.fails(PUBLISH, WrongStep("step 1"))
    with pytest.raises(Dirty, match="the published weights of step 0 are lost: a bit is wrong"):
        await group.sample(0, "answer")
    assert group.loads == [(PUBLISH, 0), (SYNC, 0), (PUBLISH, 0), *[(SYNC, 0)] * (not is_later)]
    assert group.rollout.restarts == []


@pytest.mark.parametrize(
    ("changes", "key"), [({}, "run.dir"), ({"rollout__sync_dir": "/dev/shm/w"}, "rollout.sync_dir")]
)
async def test_a_folder_that_the_groups_do_not_share_is_named_by_its_key(
    tmp_path: Path, changes: dict[str, Any], key: str
) -> None:
    group = Group(tmp_path, **changes)
    group.fails(SYNC, NotFound("version 0 is not there"))
    with pytest.raises(ConfigError, match=f"version 0 is not there; expected a folder {key} that"):
        await group.sample(0, "answer")


async def test_a_version_that_was_not_loaded_is_not_held(group: Group) -> None:
    await group.hold(0)
    group.actor.committed_step = 1
    group.fails(SYNC, InvalidArgument("another model"))
    with pytest.raises(InvalidArgument):
        await group.hold(1)
    await group.hold(0)
    assert group.loads[-1] == (SYNC, 0)
