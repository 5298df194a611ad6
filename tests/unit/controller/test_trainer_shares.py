"""Two groups sample the rollouts, also in turns with the critic on its devices: what is learned, who waits."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import pytest

from controller.workers.command import CommandReply
from splitppo.batch import Batch
from splitppo.config import Schedule
from splitppo.rpc.errors import Place, Unavailable
from splitppo.v1.batch_pb2 import SLOT_KIND_EXPERIENCE, Slot
from tests.support.call_log import DEADLINE_S, CallLog
from tests.support.fake_rollout import FakeRollout
from tests.support.fake_run import FakeRun, make_run
from tests.support.fake_services import FakeActor, FakeCritic

SCHEDULES: list[Schedule] = ["serial", "gather", "overlap"]
STEPS = [1, 2, 3]
ON_CRITICS_CORES: dict[str, Any] = {"services__critic__cpus": [1], "services__rollout": {"cpus": [1]}}
DEVICES: dict[str, dict[str, Any]] = {"own": {"services__rollout": {}}, "the critic's": ON_CRITICS_CORES}
KINDS: dict[str, dict[str, Any]] = {
    "all prompts": {},
    "parts": {"rollout__stream_groups": 4},
    "parts, reference on the critic": {
        "rollout__stream_groups": 4,
        "algorithm__use_kl_in_reward": True,
        "placement__reference": "critic",
    },
    "dynamic sampling": {"algorithm__filter_groups__enable": True, "reward_model__model": "models/reward"},
    "greedy baseline": {"algorithm__adv_estimator": "remax"},
    "reward model": {"reward_model__model": "models/reward"},
}
VALIDATES: dict[str, Any] = {"validates": True, "data__val_files": "v", "evaluation__test_freq": 1}

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_task_is_left")]


class Actor(FakeActor):
    """Remembers the rows and columns that each step learns from."""

    def __init__(self, log: CallLog) -> None:
        super().__init__(log)
        self.learned: defaultdict[int, dict[str, list[list[float]]]] = defaultdict(dict)

    async def update(self, slot: Slot, **others: Any) -> CommandReply:
        for name in ("prompts", "seeds", "responses", "rollout_log_probs", "advantages"):
            self.learned[slot.step][name] = [row.tolist() for row in self._slot(slot)[name].rows()]
        return await super().update(slot, **others)


class Critic(FakeCritic):
    """Remembers the part and the rows of each call that computes values."""

    def __init__(self, log: CallLog) -> None:
        super().__init__(log)
        self.valued: defaultdict[int, list[tuple[int, Batch]]] = defaultdict(list)

    async def compute_values(self, slot: Slot, *, base_step: int) -> CommandReply:
        assert slot.kind == SLOT_KIND_EXPERIENCE
        self.valued[slot.step].append((slot.part, self._slot(slot)))
        return await super().compute_values(slot, base_step=base_step)


def run_of(run_dir: Path, **changes: Any) -> FakeRun:
    return make_run(run_dir, actor=Actor, critic=Critic, **{"data__train_batch_size": 4, **changes})


def shared_run(run_dir: Path, devices: str, **changes: Any) -> tuple[FakeRun, FakeRollout]:
    run = run_of(run_dir, **{"rollout__share": 0.5, **DEVICES[devices], **changes})
    rollout = run.trainer.workers.rollout
    assert isinstance(rollout, FakeRollout)
    return run, rollout


async def in_time(work: Awaitable[None]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        await work


def learning(run: FakeRun) -> Any:
    timed = ("timing", "perf/", "overlap/", "rpc/", "recovery/")
    lines = [{name: value for name, value in row.items() if not name.startswith(timed)} for row in run.metrics]
    assert isinstance(run.actor, Actor)
    return lines, run.actor.learned


def calls(run: FakeRun, name: str) -> list[int]:
    """The steps of the calls of this name, in the order in which they began."""
    return [step for what, of, step in run.log.events if (what, of) == ("begin", name)]


async def pause() -> None:
    """Lets everything go on that waits for nothing."""
    for _ in range(100):
        await asyncio.sleep(0)


# What is learned.


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("devices", DEVICES)
async def test_all_schedules_learn_what_they_learn_from_the_actors_rollouts(
    tmp_path: Path, devices: str, kind: str
) -> None:
    changes = {**KINDS[kind], **VALIDATES, "evaluation__val_before_train": True}
    alone = run_of(tmp_path / "alone", **changes)
    await alone.trainer.fit()
    assert len(alone.metrics) == 4
    for schedule in SCHEDULES:
        run, _ = shared_run(tmp_path / schedule, devices, run__schedule=schedule, **changes)
        await in_time(run.trainer.fit())
        assert learning(run) == learning(alone)
        for work in ("generate", "validate"):
            assert set(calls(run, f"actor.{work}")) == set(calls(run, f"rollout.{work}")) > {2}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("devices", DEVICES)
async def test_every_part_has_a_number_and_every_row_is_valued_once(
    tmp_path: Path, devices: str, schedule: Schedule
) -> None:
    run, rollout = shared_run(tmp_path, devices, run__schedule=schedule, **KINDS["parts, reference on the critic"])
    run.log.lose("rollout", "rollout.part", at_step=2)
    await in_time(run.trainer.fit())
    assert len(rollout.restarts) == 1
    assert isinstance(run.actor, Actor)
    assert isinstance(run.critic, Critic)
    for step in STEPS:
        parts = run.critic.valued[step]
        assert [part for part, _ in parts] == [*range(1, len(parts) + 1)]
        assert len(parts) >= 4
        rows = [
            (int(place[0]), prompt.tolist(), response.tolist())
            for _, part in parts
            for place, prompt, response in zip(
                part["places"].rows(), part["prompts"].rows(), part["responses"].rows(), strict=True
            )
        ]
        learned = run.actor.learned[step]
        assert sorted(rows) == [*zip(range(8), learned["prompts"], learned["responses"], strict=True)]
    num_parts = len(calls(run, "critic.ref_log_probs"))
    assert len([columns for _, columns in run.critic.puts if "places" in columns]) == num_parts


# Who waits for whom.


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("at_step", [0, 2])
@pytest.mark.parametrize("devices", DEVICES)
async def test_the_first_version_is_published_before_the_actor_is_busy(
    tmp_path: Path, devices: str, at_step: int, schedule: Schedule
) -> None:
    run, _ = shared_run(tmp_path, devices, run__schedule=schedule, at_step=at_step)
    await in_time(run.trainer.fit())
    events = run.log.events
    published = events.index(("end", "actor.publish_weights", at_step))
    assert published < events.index(("begin", "actor.generate", at_step + 1))
    assert published < events.index(("begin", "rollout.sync_weights", at_step))
    assert calls(run, "actor.publish_weights") == [*range(at_step, 4)]


async def test_on_the_critics_devices_its_update_ends_before_the_group_loads_and_samples(tmp_path: Path) -> None:
    run, _ = shared_run(tmp_path, "the critic's", run__schedule="overlap", run__total_steps=2)
    finish_update = run.log.hold("critic.update", at_step=1)
    fitting = asyncio.create_task(run.trainer.fit())
    await run.log.until("end", "actor.generate", 2)
    await pause()
    assert calls(run, "rollout.sync_weights") == [0]
    assert calls(run, "rollout.generate") == [1]
    assert set(calls(run, "critic.values")) == {1}
    finish_update.set()
    await in_time(fitting)
    assert run.log.order(
        ("end", "critic.update", 1),
        ("begin", "rollout.sync_weights", 1),
        ("end", "rollout.generate", 2),
        ("begin", "critic.values", 2),
    )


@pytest.mark.parametrize("schedule", ["gather", "overlap"])
async def test_on_the_critics_devices_values_wait_until_the_group_has_sampled(
    tmp_path: Path, schedule: Schedule
) -> None:
    run, _ = shared_run(tmp_path, "the critic's", run__schedule=schedule, run__total_steps=1, **KINDS["parts"])
    go_on = run.log.hold("rollout.part", at_step=2)
    fitting = asyncio.create_task(run.trainer.fit())
    await run.log.until("end", "actor.generate", 1)
    await run.log.until("end", "scorer.score", 3)  # of three parts
    await pause()
    assert "critic.values" not in run.log.names()
    go_on.set()
    await in_time(fitting)
    assert run.log.order(("end", "rollout.generate", 1), ("begin", "critic.values", 1))


@pytest.mark.parametrize("schedule", ["gather", "overlap"])
async def test_on_devices_of_its_own_the_group_holds_up_nobody(tmp_path: Path, schedule: Schedule) -> None:
    run, rollout = shared_run(tmp_path, "own", run__schedule=schedule, run__total_steps=2, **KINDS["parts"])
    go_on = run.log.hold("rollout.generate", at_step=1)
    fitting = asyncio.create_task(run.trainer.fit())
    await run.log.until("end", "critic.values", 1)  # of the actor's first part
    assert not run.log.happened("end", "rollout.generate", 1)
    go_on.set()
    await in_time(fitting)
    assert rollout.slept == 0


async def test_on_devices_of_its_own_the_group_samples_while_the_critic_still_updates(tmp_path: Path) -> None:
    run, _ = shared_run(tmp_path, "own", run__schedule="overlap", **VALIDATES)
    finish_update = run.log.hold("critic.update", at_step=1)
    fitting = asyncio.create_task(run.trainer.fit())
    await run.log.until("end", "rollout.validate", 1)
    await run.log.until("end", "rollout.generate", 2)
    assert not run.log.happened("end", "critic.update", 1)
    finish_update.set()
    await in_time(fitting)


async def test_on_the_critics_devices_a_validation_waits_for_the_critics_update(tmp_path: Path) -> None:
    run, _ = shared_run(tmp_path, "the critic's", run__schedule="overlap", run__total_steps=2, **VALIDATES)
    finish_update = run.log.hold("critic.update", at_step=1)
    fitting = asyncio.create_task(run.trainer.fit())
    await run.log.until("end", "actor.validate", 1)
    await pause()
    assert calls(run, "rollout.sync_weights") == [0]
    assert "rollout.validate" not in run.log.names()
    finish_update.set()
    await in_time(fitting)
    assert run.log.order(
        ("end", "critic.update", 1), ("begin", "rollout.sync_weights", 1), ("end", "rollout.validate", 1)
    )


@pytest.mark.promise("shared devices")
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "greedy baseline"])
async def test_on_the_critics_devices_one_group_computes_at_a_time_and_the_other_one_sleeps(
    tmp_path: Path, kind: str, schedule: Schedule
) -> None:
    run, rollout = shared_run(tmp_path, "the critic's", run__schedule=schedule, **KINDS[kind], **VALIDATES)
    await in_time(run.trainer.fit())
    running = {"critic": 0, "rollout": 0}
    for what, name, _ in run.log.events:
        role, _, work = name.partition(".")
        if role in running and what != "ready" and work != "save_checkpoint":
            running[role] += {"begin": 1, "end": -1}[what]
            assert min(running.values()) == 0, f"{what} {name}"
    assert rollout.slept == len(rollout.sampling) > 0
    assert run.actor.slept == 0


# Losses and failures.


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("lost", "sampled", "validated"),
    [
        ("sync_weights", [1, 2, 3], [1, 2, 3]),
        ("generate", [1, 2, 2, 3], [1, 2, 3]),
        ("part", [1, 1, 2, 3], [1, 2, 3]),
        ("validate", [1, 2, 3], [1, 2, 2, 3]),
    ],
)
async def test_a_group_that_is_lost_in_its_turn_samples_its_share_again_and_nobody_else_does(
    tmp_path: Path, lost: str, sampled: list[int], validated: list[int], schedule: Schedule
) -> None:
    changes = {**VALIDATES, **KINDS["parts" if lost == "part" else "all prompts"]}
    undisturbed = run_of(tmp_path / "undisturbed", **changes)
    await undisturbed.trainer.fit()
    run, rollout = shared_run(tmp_path / "lost", "the critic's", run__schedule=schedule, **changes)
    run.log.lose("rollout", f"rollout.{lost}", at_step=2)
    await in_time(run.trainer.fit())
    assert len(rollout.restarts) == 1
    assert learning(run) == learning(undisturbed)
    assert (calls(run, "rollout.generate"), calls(run, "rollout.validate")) == (sampled, validated)
    for once in ("actor.generate", "actor.validate", "critic.update"):
        assert calls(run, once) == STEPS


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("validation", [{}, VALIDATES], ids=["", "with a validation"])
async def test_a_critic_that_fails_in_its_update_ends_the_run_with_its_error(
    tmp_path: Path, validation: dict[str, Any], schedule: Schedule
) -> None:
    run, rollout = shared_run(tmp_path, "the critic's", run__schedule=schedule, **validation)
    run.log.fail("critic.update", error := Unavailable("the critic is lost", Place(role="critic")))
    with pytest.raises(Unavailable) as raised:
        await in_time(run.trainer.fit())
    assert raised.value is error
    await run.trainer.abandon()
    assert calls(run, "rollout.generate") == [1]
    assert "rollout.validate" not in run.log.names()
    assert rollout.restarts == []
