"""The pair that a run goes back to: the newest complete one, the same for both roles."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from controller.run.folder import RunFolder
from controller.run.restore import RestorePoint
from controller.run.state import RunState
from controller.workers.command import CommandReply
from controller.workers.worker_groups import WorkerGroups
from splitppo.config import ConfigError
from splitppo.manifest import Manifest
from splitppo.rpc.errors import DataLoss, InvalidArgument, Unavailable, WireError
from splitppo.run_folder.spans import Span
from splitppo.run_folder.summary import Best
from splitppo.v1.worker_pb2 import CommandResult
from tests.support.checkpoints import flip, write_part
from tests.support.fake_services import make_config


def save(folder: RunFolder, *steps: int, roles: Sequence[str] = ("actor", "critic")) -> None:
    for step in steps:
        part = folder.checkpoints.folder(step)
        manifests = {role: write_part(part / role, role, step) for role in roles}
        state = RunState(step=step, kl_coef=0.5).model_dump(mode="json")
        folder.checkpoints.commit(step, state, {}, manifests=manifests, keep=10)


@dataclass
class Loader:
    """A client that only loads: errors and wrong weights by step, and what was loaded."""

    role: str
    folder: RunFolder
    errors: dict[int, WireError] = field(default_factory=dict)
    weights: dict[int, str] = field(default_factory=dict)
    loaded: list[int] = field(default_factory=list)
    last: asyncio.Event | None = None

    def is_fresh_at(self, step: int) -> bool:
        return step == 0 and not self.loaded

    async def load_checkpoint(self, step: int) -> CommandReply:
        self.loaded.append(step)
        if step in self.errors:
            raise self.errors[step]
        if step == 0:
            return reply(step, "")
        if self.last is not None:
            await self.last.wait()
            assert self.folder.checkpoints.folder(step).exists(), "it is being read"
        manifest: Mapping[str, Manifest] = self.folder.checkpoints.check(step)
        return reply(step, self.weights.get(step, manifest[self.role].weights_sha256))


def reply(step: int, weights_sha256: str) -> CommandReply:
    return CommandReply(CommandResult(weights_sha256=weights_sha256), step, step + 0.5)


class Groups(WorkerGroups):
    """Groups without processes."""

    def __init__(self, folder: RunFolder) -> None:
        self.actor, self.critic = Loader("actor", folder), Loader("critic", folder)

    @property
    def trained(self) -> Any:
        return [self.actor, self.critic]


def point_of(folder: RunFolder) -> RestorePoint:
    return RestorePoint(folder.config, folder.checkpoints)


async def restore(groups: Groups, point: RestorePoint) -> int:
    await point.restore(groups)
    return point.step


@pytest.fixture
def folder(tmp_path: Path) -> Any:
    with RunFolder(make_config(tmp_path / "run")) as folder:
        yield folder


@pytest.fixture
def groups(folder: RunFolder) -> Groups:
    return Groups(folder)


async def test_both_roles_go_to_the_newest_pair(folder: RunFolder, groups: Groups) -> None:
    save(folder, 1, 2)
    assert await restore(groups, point_of(folder)) == 2
    assert groups.actor.loaded == groups.critic.loaded == [2]


async def test_a_damaged_pair_stays_where_it_is_until_nobody_reads_it_any_more(
    folder: RunFolder, groups: Groups
) -> None:
    save(folder, 1, 2)
    groups.actor.errors[2] = DataLoss("actor/shard: expected sha256 a, found b")
    groups.critic.last = asyncio.Event()
    restoring = asyncio.create_task(restore(groups, point_of(folder)))
    for _ in range(20):  # the actor fails, and whoever does not wait for the critic would go on
        await asyncio.sleep(0)
    assert groups.actor.loaded == groups.critic.loaded == [2]
    assert folder.checkpoints.steps() == [1, 2]
    groups.critic.last.set()
    assert await restoring == 1
    assert groups.critic.loaded == [2, 1]


async def test_fresh_services_are_at_the_initial_models_already(folder: RunFolder, groups: Groups) -> None:
    assert await restore(groups, point_of(folder)) == 0
    assert groups.actor.loaded == groups.critic.loaded == []


async def test_what_was_loaded_for_a_restore_is_the_timelines(folder: RunFolder, groups: Groups) -> None:
    assert await point_of(folder).restore(groups) == []  # they were there already
    save(folder, 1, 2)
    groups.critic.errors[2] = DataLoss("the shard is gone")
    assert await point_of(folder).restore(groups) == [
        Span("actor", "load_checkpoint", 1, 1.0, 1.5),
        Span("critic", "load_checkpoint", 1, 1.0, 1.5),
    ]


@pytest.mark.parametrize("role", ["actor", "critic"])
async def test_one_damaged_part_takes_both_roles_to_the_pair_before(
    folder: RunFolder, groups: Groups, role: str, caplog: pytest.LogCaptureFixture
) -> None:
    save(folder, 1, 2)
    getattr(groups, role).errors[2] = DataLoss(f"{role}/shard: expected sha256 a, found b")
    with caplog.at_level(logging.WARNING):
        assert await restore(groups, point_of(folder)) == 1
    (warning,) = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert f"the checkpoint of step 2 is damaged ({role}/shard: expected sha256 a, found b)" in warning
    assert groups.actor.loaded[-1] == groups.critic.loaded[-1] == 1
    assert folder.checkpoints.steps() == [1]


async def test_without_any_whole_pair_both_roles_reload_their_initial_models(folder: RunFolder, groups: Groups) -> None:
    save(folder, 1, 2)
    groups.critic.errors = {step: DataLoss("the shard is gone") for step in (1, 2)}
    assert await restore(groups, point_of(folder)) == 0
    assert groups.actor.loaded[-1] == groups.critic.loaded[-1] == 0


async def test_a_manifest_that_was_damaged_since_the_start_is_seen(folder: RunFolder, groups: Groups) -> None:
    save(folder, 1, 2)
    point = point_of(folder)
    flip(folder.checkpoints.folder(2) / "actor" / "manifest.json")
    assert await restore(groups, point) == 1


async def test_other_weights_than_were_saved_are_damage_that_names_the_role(
    folder: RunFolder, groups: Groups, caplog: pytest.LogCaptureFixture
) -> None:
    save(folder, 1, 2)
    groups.critic.weights[2] = "0" * 64
    assert await restore(groups, point_of(folder)) == 1
    assert "critic: expected weights with sha256 " in caplog.text
    assert f"found {'0' * 16}... after loading" in caplog.text


async def test_a_checkpoint_of_another_model_is_the_users_mistake_and_stays(folder: RunFolder, groups: Groups) -> None:
    save(folder, 1, 2)
    groups.actor.errors[2] = InvalidArgument("it holds a llama, expected a qwen2")
    with pytest.raises(ConfigError, match=r"step 2 cannot be loaded: .*holds a llama, expected a qwen2"):
        await restore(groups, point_of(folder))
    assert folder.checkpoints.steps() == [1, 2]


async def test_a_checkpoint_without_a_role_of_the_run_is_the_users_mistake(folder: RunFolder, groups: Groups) -> None:
    save(folder, 1, roles=["actor"])
    with pytest.raises(ConfigError, match="step 1 holds actor, expected also the critic of this run"):
        await restore(groups, point_of(folder))
    assert groups.actor.loaded == []


async def test_a_damaged_checkpoint_that_was_asked_for_by_name_is_an_error(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with RunFolder(make_config(run_dir)) as folder:
        save(folder, 1, 2)
    with RunFolder(make_config(run_dir, run__resume=str(run_dir / "checkpoints" / "global_step_2"))) as folder:
        groups = Groups(folder)
        groups.actor.errors[2] = DataLoss("the shard is gone")
        with pytest.raises(ConfigError, match=r"run\.resume: .*global_step_2 is damaged: the shard is gone"):
            await restore(groups, point_of(folder))
        assert folder.checkpoints.steps() == [1, 2]


async def test_a_lost_worker_is_no_damage(folder: RunFolder, groups: Groups) -> None:
    save(folder, 1)
    groups.actor.errors[1] = Unavailable("lost")
    with pytest.raises(WireError, match="lost"):
        await restore(groups, point_of(folder))
    assert folder.checkpoints.steps() == [1]


# Lost groups, before and after the first restore.


@pytest.fixture
def named(tmp_path: Path) -> Any:
    """A run that holds pairs 5, 10 and 15, and was asked to go on from 5."""
    run_dir = tmp_path / "named"
    with RunFolder(make_config(run_dir)) as folder:
        save(folder, 5, 10, 15)
    with RunFolder(make_config(run_dir, run__resume=str(run_dir / "checkpoints" / "global_step_5"))) as folder:
        yield folder


async def test_a_group_lost_before_the_first_restore_does_not_bring_a_later_pair_back(named: RunFolder) -> None:
    groups, point = Groups(named), point_of(named)
    groups.critic.errors[5] = Unavailable("killed")
    with pytest.raises(Unavailable):
        await point.restore(groups)
    assert named.checkpoints.steps() == [5, 10, 15]
    groups.critic.errors.clear()
    assert await restore(groups, point) == 5
    assert named.checkpoints.steps() == [5]


async def test_a_pair_set_aside_before_the_group_was_lost_is_not_looked_for_again(
    folder: RunFolder, groups: Groups
) -> None:
    save(folder, 1, 2)
    point = point_of(folder)
    flip(folder.checkpoints.folder(2) / "actor" / "manifest.json")
    groups.critic.errors[1] = Unavailable("killed")
    with pytest.raises(Unavailable):
        await point.restore(groups)
    groups.critic.errors.clear()
    assert await restore(groups, point) == 1


async def test_after_the_first_restore_the_newest_whole_pair_counts(named: RunFolder) -> None:
    groups, point = Groups(named), point_of(named)
    await point.restore(groups)
    save(named, 6)
    assert await restore(groups, point) == 6


async def test_a_later_pair_than_the_named_one_is_as_good_as_any(named: RunFolder) -> None:
    groups, point = Groups(named), point_of(named)
    await point.restore(groups)
    save(named, 6)
    groups.actor.errors[6] = DataLoss("the shard is gone")
    assert await restore(groups, point) == 5


async def test_a_named_pair_that_is_damaged_when_a_group_is_lost_is_still_the_users_mistake(named: RunFolder) -> None:
    groups, point = Groups(named), point_of(named)
    await point.restore(groups)
    flip(named.checkpoints.folder(5) / "actor" / "manifest.json")
    with pytest.raises(ConfigError, match=r"run\.resume: .*global_step_5 is damaged"):
        await point.restore(groups)
    assert named.checkpoints.steps() == [5]


def save_with_best(folder: RunFolder, step: int, best_step: int) -> None:
    state = RunState(
        step=step, kl_coef=0.5, best=Best(metric="val/accuracy", mode="max", step=best_step, value=0.5)
    ).model_dump(mode="json")
    folder.checkpoints.commit(step, state, {}, manifests={}, keep=10, best=best_step)


async def test_the_best_so_far_comes_back_with_its_checkpoint_and_counts_not_without_it(
    folder: RunFolder, tmp_path: Path
) -> None:
    save_with_best(folder, 1, 1)
    save_with_best(folder, 2, 1)
    assert point_of(folder).state.best_step == 1
    from_there = {"run__resume": str(folder.checkpoints.folder(2))}
    with RunFolder(make_config(tmp_path / "another", **from_there)) as another:
        assert point_of(another).state.best_step is None


async def test_to_validate_an_earlier_checkpoint_costs_no_later_one(folder: RunFolder, tmp_path: Path) -> None:
    save(folder, 1, 2)
    validating = {"data__val_files": "val.jsonl", "evaluation__val_only": True}
    earlier = validating | {"run__resume": str(folder.checkpoints.folder(1))}
    with pytest.raises(ConfigError, match=r"val_only: the run would go back to step 1, and lose its later checkpoints"):
        RestorePoint(make_config(folder.path, **earlier), folder.checkpoints)
    assert folder.checkpoints.steps() == [1, 2]
    with RunFolder(make_config(tmp_path / "another", **earlier)) as another:
        assert point_of(another).step == 1
    assert RestorePoint(make_config(folder.path, **validating), folder.checkpoints).step == 2
