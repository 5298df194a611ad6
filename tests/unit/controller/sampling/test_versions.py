"""The group that samples: it has the version that a caller names, also after it was lost."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, NoReturn

import pytest

from controller.sampling.versions import Sampler
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
from tests.support.call_log import DEADLINE_S, CallLog
from tests.support.fake_rollout import FakeRollout
from tests.support.fake_services import FakeActor, FakeCritic, make_config

GROUP: dict[str, Any] = {"services__rollout": {}}
STALE: dict[str, Any] = {"rollout__staleness": 1, "algorithm__rollout_correction__rollout_is": "token"}
ON_CRITICS_CORES: dict[str, Any] = {"services__critic__cpus": [1], "services__rollout": {"cpus": [1]}}
PUBLISH, SYNC = "actor.publish_weights", "rollout.sync_weights"


def lost(role: str = "rollout") -> Unavailable:
    return Unavailable("the group is lost", Place(role=role))


class Samplers:
    """A sampler with a rollout group, what its groups were asked for, and what it has recorded."""

    def __init__(self, run_dir: Path, **changes: Any) -> None:
        self.log = CallLog()
        self.actor, self.rollout = FakeActor(self.log), FakeRollout(self.log)
        self.config = make_config(run_dir, **{**GROUP, **changes})
        self.sampler = Sampler(self.config, self.actor, self.rollout, restart=self.rollout.restart)
        self.replies: list[tuple[str, str]] = []

    @property
    def loads(self) -> list[tuple[str, int]]:
        """The versions that were published and loaded, in this order."""
        return [(name, version) for what, name, version in self.log.events if what == "begin"]

    def note(self, pool: str, name: str, _: CommandReply) -> None:
        self.replies.append((pool, name))

    async def hold(self, version: int) -> None:
        await self.sampler.hold(self.rollout, version, self.note)

    async def sample(self, version: int, *outcomes: WireError | str) -> str:
        """Makes one attempt after the other end in these ways."""
        left = list(outcomes)

        async def attempt() -> str:
            assert self.rollout.committed_step == version
            await asyncio.sleep(0)
            if isinstance(outcome := left.pop(0), WireError):
                raise outcome
            return outcome

        answer = await self.sampler.sample(self.rollout, version, self.note, attempt)
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
def group(tmp_path: Path) -> Samplers:
    return Samplers(tmp_path)


async def test_a_version_is_published_once_and_loaded_once_per_connection(group: Samplers) -> None:
    await group.hold(0)
    await group.hold(0)
    assert group.loads == [(PUBLISH, 0), (SYNC, 0)]
    assert group.replies == [("actor", "publish"), ("rollout", "sync")]
    await group.rollout.restart(lost())
    await group.hold(0)
    assert group.loads[2:] == [(SYNC, 0)]


async def test_the_named_version_is_loaded_although_a_newer_one_is_published(group: Samplers) -> None:
    await group.hold(0)
    group.actor.committed_step = 1
    await group.sampler.publish(1, group.note)
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
    group = Samplers(tmp_path, **changes)
    await group.hold(0)
    group.actor.committed_step = 3
    await group.hold(3)
    assert group.actor.published == published


async def test_without_a_rollout_group_nothing_is_published(tmp_path: Path) -> None:
    actor = FakeActor(CallLog())
    sampler = Sampler(make_config(tmp_path), actor)
    await sampler.publish(0, lambda *_: None)
    assert await sampler.sample(actor, 0, lambda *_: None, lambda: asyncio.sleep(0, "answer")) == "answer"
    assert actor.published == []


async def test_a_lost_group_is_started_again_and_asked_again(group: Samplers) -> None:
    assert await group.sample(0, lost(), PeerDied("", Place(role="rollout", rank=1)), "answer") == "answer"
    assert len(group.rollout.restarts) == 2
    assert group.loads == [(PUBLISH, 0), *[(SYNC, 0)] * 3]


async def test_a_group_that_is_lost_while_it_loads_is_started_again(group: Samplers) -> None:
    group.fails(SYNC, lost())
    assert await group.sample(0, "answer") == "answer"
    assert group.loads == [(PUBLISH, 0), *[(SYNC, 0)] * 2]


async def test_a_group_that_has_ended_is_noticed_while_nothing_fails(tmp_path: Path) -> None:
    log, has_ended = CallLog(), asyncio.Event()
    rollout = FakeRollout(log)
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

    sampler = Sampler(make_config(tmp_path, **GROUP), FakeActor(log), rollout, watch=watch, restart=restart)
    assert await sampler.sample(rollout, 0, lambda *_: None, attempt) == "answer"
    assert len(rollout.restarts) == 1


async def test_callers_that_lose_the_group_together_restart_it_once(group: Samplers) -> None:
    barrier = asyncio.Barrier(3)
    losses = [lost() for _ in range(3)]

    async def attempt() -> int:
        if losses:
            error = losses.pop()
            await barrier.wait()
            raise error
        return group.rollout.committed_step

    answers = await asyncio.gather(*(group.sampler.sample(group.rollout, 0, group.note, attempt) for _ in range(3)))
    assert answers == [0, 0, 0]
    assert len(group.rollout.restarts) == 1
    assert group.loads == [(PUBLISH, 0), *[(SYNC, 0)] * 2]


@pytest.mark.parametrize("error", [lost("actor"), InvalidArgument("", Place(role="rollout")), Dirty("")])
async def test_other_errors_and_those_of_other_groups_are_the_callers(group: Samplers, error: WireError) -> None:
    with pytest.raises(type(error)) as raised:
        await group.sample(0, error)
    assert raised.value is error
    assert group.rollout.restarts == []


async def test_the_loss_of_the_actor_while_it_publishes_is_the_callers(group: Samplers) -> None:
    group.fails(PUBLISH, error := lost("actor"))
    with pytest.raises(Unavailable) as raised:
        await group.sample(0, "answer")
    assert raised.value is error


async def test_a_restart_that_is_not_allowed_ends_the_call(tmp_path: Path) -> None:
    log = CallLog()
    rollout = FakeRollout(log)
    sampler = Sampler(make_config(tmp_path, **GROUP), FakeActor(log), rollout)

    async def attempt() -> None:
        raise lost()

    with pytest.raises(Unavailable):
        await sampler.sample(rollout, 0, lambda *_: None, attempt)


async def test_a_damaged_version_is_published_once_more(group: Samplers) -> None:
    group.fails(SYNC, DataLoss("a bit is wrong"))
    await group.hold(0)
    assert group.loads == [(PUBLISH, 0), (SYNC, 0)] * 2
    assert group.rollout.committed_step == 0


@pytest.mark.parametrize("is_later", [False, True], ids=["damaged again", "the actor is at a later step"])
async def test_a_version_that_stays_damaged_sends_all_groups_back_to_their_checkpoint(
    group: Samplers, *, is_later: bool
) -> None:
    await group.sampler.publish(0, group.note)
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
    group = Samplers(tmp_path, **changes)
    group.fails(SYNC, NotFound("version 0 is not there"))
    with pytest.raises(ConfigError, match=f"version 0 is not there; expected a folder {key} that"):
        await group.sample(0, "answer")


async def test_a_version_that_was_not_loaded_is_not_held(group: Samplers) -> None:
    await group.hold(0)
    group.actor.committed_step = 1
    group.fails(SYNC, InvalidArgument("another model"))
    with pytest.raises(InvalidArgument):
        await group.hold(1)
    await group.hold(0)
    assert group.loads[-1] == (SYNC, 0)


# Both groups sample.


async def test_the_actor_is_busy_only_once_the_version_is_published_which_it_is_once_for_both(group: Samplers) -> None:
    go_on, begun = group.log.hold(PUBLISH, at_step=0), list[str]()

    async def attempt() -> None:
        begun.append("actor")

    sampling = asyncio.create_task(group.sampler.sample(group.actor, 0, group.note, attempt))
    other = asyncio.create_task(group.sample(0, "answer"))
    await group.log.until("begin", PUBLISH, 0)
    for _ in range(20):
        await asyncio.sleep(0)
    assert begun == []
    go_on.set()
    await asyncio.gather(sampling, other)
    await group.sampler.sample(group.actor, 0, group.note, attempt)
    assert begun == ["actor", "actor"]
    assert group.loads == [(PUBLISH, 0), (SYNC, 0)]


@pytest.mark.parametrize("changes", [GROUP, ON_CRITICS_CORES], ids=["own cores", "the critic's cores"])
async def test_only_on_the_critics_devices_the_group_waits_for_its_update_and_holds_it_up(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    group, takes_turns = Samplers(tmp_path, **changes), changes is ON_CRITICS_CORES
    critic, is_updated, others = FakeCritic(group.log), asyncio.Event(), list[str]()
    group.sampler.after_critic_update = is_updated.wait  # type: ignore[assignment]

    async def compute(client: FakeActor | FakeCritic) -> None:
        async with group.sampler.turn_of(client):
            others.append(client.role)

    sampled = group.log.hold(SYNC, at_step=0)
    sampling = asyncio.create_task(group.sample(0, "answer"))
    if takes_turns:
        for _ in range(20):
            await asyncio.sleep(0)
        assert group.loads == []
        is_updated.set()
    await group.log.until("begin", SYNC, 0)
    computing = [asyncio.create_task(compute(client)) for client in (critic, group.actor)]
    for _ in range(20):
        await asyncio.sleep(0)
    assert others == (["actor"] if takes_turns else ["critic", "actor"])
    sampled.set()
    await asyncio.gather(sampling, *computing)
    assert sorted(others) == ["actor", "critic"]
    assert is_updated.is_set() == takes_turns


async def test_the_turn_ends_with_the_last_attempt_also_if_it_fails(tmp_path: Path) -> None:
    group, order = Samplers(tmp_path, **ON_CRITICS_CORES), list[str]()
    errors = [lost(), InvalidArgument("", Place(role="rollout"))]

    async def attempt() -> None:
        order.append("rollout")
        await asyncio.sleep(0)
        raise errors.pop(0)

    async def compute() -> None:
        async with group.sampler.turn_of(FakeCritic(group.log)):
            order.append("critic")

    sampling = asyncio.create_task(group.sampler.sample(group.rollout, 0, group.note, attempt))
    await group.log.until("begin", PUBLISH, 0)
    computing = asyncio.create_task(compute())
    with pytest.raises(InvalidArgument):
        await sampling
    await computing
    assert order == ["rollout", "rollout", "critic"]
    assert len(group.rollout.restarts) == 1


async def test_a_failed_update_of_the_critic_is_the_error_of_who_waits_and_nothing_is_sampled(tmp_path: Path) -> None:
    group = Samplers(tmp_path, **ON_CRITICS_CORES)

    async def update() -> None:
        raise lost("critic")

    group.sampler.after_critic_update = update
    with pytest.raises(Unavailable):
        await group.sample(0)
    assert group.loads == group.rollout.restarts == []
    async with asyncio.timeout(DEADLINE_S), group.sampler.turn_of(group.rollout):
        pass
