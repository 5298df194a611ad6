"""Partial rollouts: a step samples some tokens of each response, and learns from the oldest complete prompts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from controller.data.sampled_prompts import SampledPrompts
from controller.step.look_ahead import step_rollouts
from controller.step.pool import UnlearnedPrompts
from splitppo.batch import Batch
from splitppo.config import ConfigError, Schedule
from splitppo.v1.batch_pb2 import SLOT_KIND_CANDIDATES, SLOT_KIND_EXPERIENCE, Slot
from tests.support.fake_rollout import FakeRollout
from tests.support.fake_run import FakeRun, make_run
from tests.support.fake_services import FakeActor, make_table
from tests.support.user_samplers import WORST

SCHEDULES: list[Schedule] = ["serial", "gather", "overlap"]
TOKEN: dict[str, Any] = {"algorithm__rollout_correction__rollout_is": "token"}
PARTIAL: dict[str, Any] = {"rollout__max_step_tokens": 1, **TOKEN}
GROUP: dict[str, Any] = {"services__rollout": {}}

pytestmark = pytest.mark.usefixtures("no_task_is_left")


class Actor(FakeActor):
    """Remembers what was put to it, and how many rows each round has sampled."""

    def __init__(self, log: Any) -> None:
        super().__init__(log)
        self.learned: dict[int, Batch] = {}
        self.rounds: list[tuple[int, int, int]] = []  # step, version, rows

    async def put_batch(self, slot: Slot, batch: Batch) -> None:
        if slot.kind == SLOT_KIND_EXPERIENCE and "responses" in batch:
            self.learned[slot.step] = batch
        await super().put_batch(slot, batch)

    async def generate(self, slot: Slot, *args: Any, base_step: int, **others: Any) -> Any:
        if slot.kind == SLOT_KIND_CANDIDATES:
            self.rounds.append((slot.step, base_step, len(self._slot(slot)["seeds"].values)))
        return await super().generate(slot, *args, base_step=base_step, **others)


def run_of(run_dir: Path, **changes: Any) -> tuple[FakeRun, Actor]:
    run = make_run(run_dir, actor=Actor, **{**PARTIAL, **changes})
    assert isinstance(run.actor, Actor)
    return run, run.actor


def learning(run: FakeRun) -> list[dict[str, Any]]:
    timed = ("timing", "perf/", "overlap/", "rpc/", "training/probe_", "recovery/")
    return [{name: value for name, value in row.items() if not name.startswith(timed)} for row in run.metrics]


def seeds_of(actor: Actor) -> list[list[int]]:
    return [actor.learned[step]["seeds"].values.tolist() for step in sorted(actor.learned)]


async def test_every_response_that_is_begun_is_learned_from_whole_and_once(tmp_path: Path) -> None:
    run, actor = run_of(tmp_path, run__total_steps=6)
    await run.trainer.fit()
    assert sorted(actor.learned) == [1, 2, 3, 4, 5, 6]
    for batch in actor.learned.values():
        assert batch.num_rows == 4
        lengths = 1 + batch["seeds"].values % 4  # of the fake's responses
        assert batch["responses"].lengths.tolist() == lengths.tolist()
        assert np.allclose(batch["rollout_log_probs"].values, -0.1 * batch["responses"].values)
    seeds = [seed for of_step in seeds_of(actor) for seed in of_step]
    assert len({*seeds}) == 24
    assert [row["partial/num_pending"] + row["partial/num_waiting"] for row in run.metrics][-1] == 0
    assert [row["training/epoch"] for row in run.metrics] == [0, 0, 0, 1, 1, 1]


async def test_a_response_goes_on_with_the_weights_of_each_step(tmp_path: Path) -> None:
    run, actor = run_of(tmp_path, run__total_steps=6)
    await run.trainer.fit()
    assert all(version == step - 1 for step, version, _ in actor.rounds)
    ages = [row["partial/max_age"] for row in run.metrics]
    assert max(ages) > 0
    assert max(ages) <= 4
    for row in run.metrics:
        shares = {name: share for name, share in row.items() if name.startswith("partial/age_share/")}
        assert sum(shares.values()) == pytest.approx(1.0)
        mean = sum(int(name.rpartition("/")[2]) * share for name, share in shares.items())
        assert row["training/staleness"] == pytest.approx(mean)


async def test_with_room_for_whole_responses_nothing_differs_from_sampling_them_at_once(tmp_path: Path) -> None:
    off, _ = run_of(tmp_path / "off", run__total_steps=5, rollout__max_step_tokens=None)
    await off.trainer.fit()
    on, _ = run_of(tmp_path / "on", run__total_steps=5, rollout__max_step_tokens=4, rollout__overcommit=1.0)
    await on.trainer.fit()
    own = ("partial/", "training/staleness")
    ours = [{name: value for name, value in row.items() if not name.startswith(own)} for row in learning(on)]
    assert ours == learning(off)
    assert [row["partial/length_ratio"] for row in on.metrics] == [1.0] * 5


@pytest.mark.parametrize("schedule", SCHEDULES)
async def test_all_schedules_learn_from_the_same_numbers(tmp_path: Path, schedule: Schedule) -> None:
    lines = []
    for one in ("serial", schedule):
        run, _ = run_of(tmp_path / one / "run", run__schedule=one, run__total_steps=4)
        await run.trainer.fit()
        lines.append(learning(run))
    assert lines[0] == lines[1]


@pytest.mark.parametrize("stopped_after", [1, 2, 3, 4])
async def test_a_resumed_run_goes_on_with_what_is_stored(tmp_path: Path, stopped_after: int) -> None:
    whole, of_whole = run_of(tmp_path / "whole", run__total_steps=5)
    await whole.trainer.fit()

    first, _ = run_of(tmp_path / "stopped", run__total_steps=5, run__stop_after_step=stopped_after)
    await first.trainer.fit()
    stored, state = first.store.rollouts(stopped_after), first.store.load(stopped_after).state
    assert stored is not None

    second, of_second = run_of(tmp_path / "stopped", run__total_steps=5, at_step=stopped_after, rollouts=stored)
    second.trainer = replace(second.trainer, state=state)
    await second.trainer.fit()
    assert of_second.rounds == [one for one in of_whole.rounds if one[0] > stopped_after]
    for step in range(stopped_after + 1, 6):
        for name in ("prompts", "responses", "seeds", "rollout_log_probs"):
            resumed, undisturbed = of_second.learned[step][name], of_whole.learned[step][name]
            assert resumed.values.tolist() == undisturbed.values.tolist()
    assert learning(second)[stopped_after:] == learning(whole)[stopped_after:]


async def test_the_last_checkpoint_has_nothing_pending_and_an_extended_run_goes_on(tmp_path: Path) -> None:
    run, _ = run_of(tmp_path, run__total_steps=2)
    await run.trainer.fit()
    assert run.store.rollouts(2) is None
    longer, actor = run_of(tmp_path, run__total_steps=4, at_step=2)
    longer.trainer = replace(longer.trainer, state=run.store.load(2).state)
    await longer.trainer.fit()
    assert sorted(actor.learned) == [3, 4]


async def test_a_run_that_is_made_shorter_or_longer_learns_from_all_that_it_has_begun(tmp_path: Path) -> None:
    run, actor = run_of(tmp_path, run__total_steps=6, run__stop_after_step=2)
    await run.trainer.fit()
    learned = seeds_of(actor)
    for done, total in ((2, 3), (3, 6)):
        stored, state = run.store.rollouts(done), run.store.load(done).state
        run, actor = run_of(tmp_path, run__total_steps=total, at_step=done, rollouts=stored)
        run.trainer = replace(run.trainer, state=state)
        await run.trainer.fit()
        assert run.store.rollouts(total) is None
        learned += seeds_of(actor)
    assert len({seed for of_step in learned for seed in of_step}) == 24


async def test_a_users_sampler_that_chooses_by_scores_chooses_the_same_after_a_resume(tmp_path: Path) -> None:
    (tmp_path / "prompts.py").write_text(WORST)
    changes: dict[str, Any] = {
        "run__total_steps": 5,
        "data__sampler": {"class_path": str(tmp_path / "prompts.py"), "class_name": "Worst"},
    }

    def run_with(folder: str, **more: Any) -> tuple[FakeRun, Actor]:
        run, actor = run_of(tmp_path / folder, **changes, **more)
        prompts = SampledPrompts(make_table(), run.config.data, seed=run.config.run.seed)
        state = run.store.load(2).state if "at_step" in more else run.trainer.state
        rollouts = step_rollouts(run.config, prompts.restored(state.sampler), more.get("rollouts"))
        run.trainer = replace(run.trainer, rollouts=rollouts, state=state)
        return run, actor

    whole, of_whole = run_with("whole")
    await whole.trainer.fit()
    first, _ = run_with("stopped", run__stop_after_step=2)
    await first.trainer.fit()
    second, of_second = run_with("stopped", at_step=2, rollouts=first.store.rollouts(2))
    await second.trainer.fit()
    assert seeds_of(of_second) == seeds_of(of_whole)[2:]
    assert learning(second)[2:] == learning(whole)[2:]


async def test_prompts_that_have_changed_are_refused(tmp_path: Path) -> None:
    run, _ = run_of(tmp_path, run__total_steps=3, run__stop_after_step=1)
    await run.trainer.fit()
    stored, table = run.store.rollouts(1), make_table()
    assert stored is not None
    turned = table.take(table.row_indices[::-1].copy())
    with pytest.raises(ConfigError, match=r"holds responses to other prompts than these \(rollout.max_step_tokens\)"):
        UnlearnedPrompts.parse(stored, turned)
    with pytest.raises(ConfigError, match="not what this version writes"):
        UnlearnedPrompts.parse(stored[:40], table)


@pytest.mark.parametrize("schedule", SCHEDULES)
async def test_a_rollout_group_that_is_lost_changes_nothing_of_what_is_learned(
    tmp_path: Path, schedule: Schedule
) -> None:
    actors, _ = run_of(tmp_path / "actor", run__total_steps=4)
    await actors.trainer.fit()
    groups, _ = run_of(tmp_path / "group", run__total_steps=4, run__schedule=schedule, **GROUP)
    groups.log.lose("rollout", "rollout.generate", at_step=3)
    await groups.trainer.fit()
    rollout = groups.trainer.workers.rollout
    assert isinstance(rollout, FakeRollout)
    assert len(rollout.restarts) == 1
    assert learning(groups) == learning(actors)
    assert "actor.generate" not in groups.log.names()
