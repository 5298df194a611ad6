"""Staleness 1: a step learns from what the weights before the last update have sampled, also after a resume."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from controller.run.checkpoint_store import ROLLOUTS
from controller.sampling.keep import TooFewSampleGroups
from controller.step.finished import FinishedRollouts
from controller.step.log_prob_check import RolloutMismatch
from splitppo.batch import Batch
from splitppo.config import ConfigError, Schedule
from splitppo.manifest import DamagedCheckpoint
from splitppo.v1.batch_pb2 import SLOT_KIND_CANDIDATES, SLOT_KIND_EXPERIENCE, Slot
from tests.support.fake_rollout import FakeRollout
from tests.support.fake_run import FakeRun, make_run
from tests.support.fake_services import FakeActor, make_table

SCHEDULES: list[Schedule] = ["serial", "gather", "overlap"]
STALE: dict[str, Any] = {"rollout__staleness": 1, "algorithm__rollout_correction__rollout_is": "token"}
KINDS: dict[str, dict[str, Any]] = {
    "all prompts": {},
    "dynamic sampling": {"algorithm__filter_groups__enable": True},
    "greedy baseline": {"algorithm__adv_estimator": "remax"},
    "reward model": {"reward_model__model": "models/reward"},
}

pytestmark = pytest.mark.usefixtures("no_task_is_left")


GROUP: dict[str, Any] = {"services__rollout": {}}


class Actor(FakeActor):
    """Remembers what was put to it and, of each generation, the weights that answered."""

    def __init__(self, log: Any) -> None:
        super().__init__(log)
        self.learned: dict[int, Batch] = {}
        self.versions: list[tuple[int, int]] = []

    async def put_batch(self, slot: Slot, batch: Batch) -> None:
        if slot.kind == SLOT_KIND_EXPERIENCE and "responses" in batch:
            self.learned[slot.step] = batch
        await super().put_batch(slot, batch)

    async def generate(self, slot: Slot, *args: Any, base_step: int, **others: Any) -> Any:
        if slot.kind == SLOT_KIND_CANDIDATES:
            self.versions.append((slot.step, base_step))
            assert base_step == self.committed_step
        return await super().generate(slot, *args, base_step=base_step, **others)


def run_of(run_dir: Path, **changes: Any) -> tuple[FakeRun, Actor]:
    run = make_run(run_dir, actor=Actor, **{**STALE, **changes})
    assert isinstance(run.actor, Actor)
    return run, run.actor


def learning(run: FakeRun) -> list[dict[str, Any]]:
    timed = ("timing", "perf/", "overlap/", "rpc/", "training/probe_", "recovery/")
    return [{name: value for name, value in row.items() if not name.startswith(timed)} for row in run.metrics]


async def test_each_step_learns_from_the_weights_one_update_before_its_own(tmp_path: Path) -> None:
    run, actor = run_of(tmp_path, run__total_steps=4)
    await run.trainer.fit()
    assert actor.versions == [(1, 0), (2, 0), (3, 1), (4, 2)]
    assert [row["training/staleness"] for row in run.metrics] == [0.0, 1.0, 1.0, 1.0]
    assert set(actor.learned) == {1, 2, 3, 4}


@pytest.mark.parametrize("kind", KINDS)
async def test_all_schedules_learn_from_the_same_numbers(tmp_path: Path, kind: str) -> None:
    lines = []
    for schedule in SCHEDULES:
        run, _ = run_of(tmp_path / schedule, run__schedule=schedule, **KINDS[kind])
        await run.trainer.fit()
        lines.append(learning(run))
    assert lines[0] == lines[1] == lines[2]
    assert len(lines[0]) > 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stopped_after", [1, 3])
async def test_a_resumed_run_learns_from_the_stored_rollouts(tmp_path: Path, kind: str, stopped_after: int) -> None:
    whole, of_whole = run_of(tmp_path / "whole", run__total_steps=5, **KINDS[kind])
    await whole.trainer.fit()

    first, _ = run_of(tmp_path / "stopped", run__total_steps=5, run__stop_after_step=stopped_after, **KINDS[kind])
    await first.trainer.fit()
    stored, state = first.store.rollouts(stopped_after), first.store.load(stopped_after).state
    assert stored is not None

    second, of_second = run_of(
        tmp_path / "stopped", run__total_steps=5, at_step=stopped_after, rollouts=stored, **KINDS[kind]
    )
    second.trainer = replace(second.trainer, state=state)
    await second.trainer.fit()
    assert [step for step, _ in of_second.versions] == [
        step for step, _ in of_whole.versions if step > stopped_after + 1
    ]
    for step in range(stopped_after + 1, 6):
        for name in ("prompts", "responses", "seeds", "rollout_log_probs"):
            resumed, undisturbed = of_second.learned[step][name], of_whole.learned[step][name]
            assert resumed.values.tolist() == undisturbed.values.tolist()
    assert learning(second)[stopped_after:] == learning(whole)[stopped_after:]


async def test_the_last_checkpoint_holds_no_rollouts_and_an_extended_run_samples_them(tmp_path: Path) -> None:
    run, _ = run_of(tmp_path, run__total_steps=2)
    await run.trainer.fit()
    assert run.store.rollouts(2) is None
    longer, actor = run_of(tmp_path, run__total_steps=3, at_step=2)
    longer.trainer = replace(longer.trainer, state=run.store.load(2).state)
    await longer.trainer.fit()
    assert actor.versions == [(3, 2)]
    assert longer.metrics[-1]["training/staleness"] == 0.0


async def test_a_step_that_cannot_be_filled_ends_the_run_after_the_step_before_it(tmp_path: Path) -> None:
    run, _ = run_of(
        tmp_path,
        run__total_steps=9,
        algorithm__filter_groups={"enable": True, "max_num_gen_batches": 1, "metric": "score"},
    )
    with pytest.raises(TooFewSampleGroups) as error:
        await run.trainer.fit()
    await run.trainer.join()
    done = run.trainer.state.step - 1
    assert f"step {done + 1} cannot be filled" in str(error.value)
    assert [row["step"] for row in run.metrics] == list(range(1, done + 1))


async def test_a_damaged_file_of_rollouts_damages_the_checkpoint(tmp_path: Path) -> None:
    run, _ = run_of(tmp_path, run__total_steps=3, run__stop_after_step=1)
    await run.trainer.fit()
    file = run.store.folder(1) / ROLLOUTS
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(DamagedCheckpoint, match=ROLLOUTS):
        run.store.check(1)


async def test_prompts_that_have_changed_are_refused(tmp_path: Path) -> None:
    run, _ = run_of(tmp_path, run__total_steps=3, run__stop_after_step=1)
    await run.trainer.fit()
    stored, table = run.store.rollouts(1), make_table()
    assert stored is not None
    turned = table.take(table.row_indices[::-1].copy())
    with pytest.raises(ConfigError, match=r"data.train_files: the checkpoint holds responses to other prompts"):
        FinishedRollouts.parse(stored, turned)
    with pytest.raises(ConfigError, match=r"data.train_files: the checkpoint holds responses to row \d+, got 1 "):
        FinishedRollouts.parse(stored, table.take(table.row_indices[:1]))
    with pytest.raises(ConfigError, match="not what this version writes"):
        FinishedRollouts.parse(stored[:40], table)


async def test_a_validation_alone_reads_no_stored_rollouts(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"evaluation__val_only": True, "data__val_files": "val.jsonl"}
    run, actor = run_of(
        tmp_path, run__total_steps=3, at_step=1, validates=True, rollouts=b"of other prompts", **changes
    )
    await run.trainer.fit()
    assert actor.versions == []
    assert run.trainer.state.validated_step == 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("schedule", SCHEDULES)
async def test_a_rollout_group_that_is_lost_changes_nothing_of_what_is_learned(
    tmp_path: Path, kind: str, schedule: Schedule
) -> None:
    actors, _ = run_of(tmp_path / "actor", run__total_steps=4, **KINDS[kind])
    await actors.trainer.fit()
    groups, _ = run_of(tmp_path / "group", run__total_steps=4, run__schedule=schedule, **KINDS[kind], **GROUP)
    groups.log.lose("rollout", "rollout.generate", at_step=3)
    await groups.trainer.fit()
    rollout = groups.trainer.workers.rollout
    assert isinstance(rollout, FakeRollout)
    assert len(rollout.restarts) == 1
    assert learning(groups) == learning(actors)
    loads = [version for what, name, version in groups.log.events if (what, name) == ("end", "rollout.sync_weights")]
    assert loads == [0, 1, 1, 2]
    assert "actor.generate" not in groups.log.names()


async def test_the_update_waits_for_the_probe_alone_while_a_rollout_group_samples(tmp_path: Path) -> None:
    run, _ = run_of(tmp_path, run__total_steps=2, run__schedule="gather", **GROUP)
    sampled = run.log.hold("rollout.generate", at_step=2)
    training = asyncio.create_task(run.trainer.fit())
    await run.log.until("end", "actor.update", 1)
    assert not run.log.happened("end", "rollout.generate", 2)
    probed = [index for index, event in enumerate(run.log.events) if event == ("end", "actor.old_log_probs", 0)]
    assert probed[0] < run.log.events.index(("begin", "actor.update", 1))
    sampled.set()
    await training
    assert [row.get("training/probe_log_probs_diff_max") for row in run.metrics] == [0.0, None]


async def test_the_update_waits_for_the_scores_of_a_reward_model_in_its_group(tmp_path: Path) -> None:
    run, _ = run_of(tmp_path, run__total_steps=2, run__schedule="gather", **KINDS["reward model"], **GROUP)
    assert run.trainer.workers.reward_model is run.critic
    sampled = run.log.hold("rollout.generate", at_step=2)
    training = asyncio.create_task(run.trainer.fit())
    await run.log.until("begin", "rollout.generate", 2)
    for _ in range(100):
        await asyncio.sleep(0)
    assert not run.log.happened("begin", "actor.update", 1)
    sampled.set()
    await training
    scored = max(index for index, event in enumerate(run.log.events) if event == ("end", "critic.reward_scores", 2))
    assert scored < run.log.events.index(("begin", "actor.update", 1))


async def test_a_version_with_other_log_probs_than_the_actors_ends_the_run_before_the_update(tmp_path: Path) -> None:
    run, actor = run_of(tmp_path, run__total_steps=3, **GROUP)
    rollout = run.trainer.workers.rollout
    assert isinstance(rollout, FakeRollout)
    rollout.rollout_offsets[1] = 1.0  # the probe of the weights of step 1
    with pytest.raises(RolloutMismatch, match="the weights of step 1 in the rollout group"):
        await run.trainer.fit()
    assert [step for step, _ in actor.updates] == [1]
