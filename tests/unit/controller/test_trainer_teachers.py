"""The dataflow of a step with teachers: who is asked for what, what is sent, and what the updates get."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from splitppo.config import Schedule
from splitppo.v1.batch_pb2 import SLOT_KIND_EXPERIENCE, Slot
from tests.support.fake_run import FakeRun, make_run
from tests.support.fake_services import VOCAB_SIZE

SCHEDULES: list[Schedule] = ["serial", "gather", "overlap"]
EXPERIENCE = Slot(kind=SLOT_KIND_EXPERIENCE, step=1)
PART = {"prompts", "responses", "places"}
TOP = {"teacher_top_ids", "teacher_top_log_probs"}
TIMED = ("timing", "perf/", "overlap/", "rpc/")
TWO = {"teacher__models": {"b": "models/second"}}

pytestmark = pytest.mark.usefixtures("no_task_is_left")


def taught(run_dir: Path, host: str = "critic", **changes: Any) -> FakeRun:
    """Returns a run of one step in two parts whose teacher is on a group."""
    sections = {"teacher__model": "models/teacher", "placement__teacher": host, "rollout__stream_groups": 2}
    return make_run(run_dir, **{"run__total_steps": 1, **sections, **changes})


def host_of(run: FakeRun) -> Any:
    return {"actor": run.actor, "critic": run.critic, "reward": run.reward}[run.config.placement.teacher]


def learned(run: FakeRun) -> list[dict[str, Any]]:
    """Returns the metrics of all steps, without what depends on the clock."""
    return [{key: value for key, value in row.items() if not key.startswith(TIMED)} for row in run.metrics]


def dumped(run_dir: Path) -> list[dict[str, Any]]:
    """The rollouts of the only step, in the order of the batch."""
    return [json.loads(line) for file in run_dir.glob("rollouts/train/*.jsonl") for line in file.open()]


# Parts.


@pytest.mark.parametrize(("host", "num_calls"), [("critic", 2), ("reward", 2), ("actor", 1)])
async def test_a_teacher_works_part_by_part_except_on_the_actor(tmp_path: Path, host: str, num_calls: int) -> None:
    run = taught(tmp_path, host)
    await run.trainer.fit()
    assert run.log.names().count(f"{host}.teacher_log_probs") == num_calls
    assert host_of(run).num_ids == [VOCAB_SIZE] * num_calls
    assert run.metrics[0]["timing_s/teacher"] > 0


@pytest.mark.parametrize("host", ["critic", "reward"])
@pytest.mark.parametrize("schedule", ["gather", "overlap"])
async def test_a_part_is_taught_while_the_next_one_is_generated(tmp_path: Path, host: str, schedule: Schedule) -> None:
    run = taught(tmp_path, host, run__schedule=schedule)
    end_part = run.log.hold("actor.part", at_step=2)
    fitting = asyncio.create_task(run.trainer.fit())
    await run.log.until("end", f"{host}.teacher_log_probs", 1)
    assert not run.log.happened("end", "actor.generate", 1)
    end_part.set()
    await fitting
    assert run.log.order(("end", "actor.generate", 1), ("begin", "actor.update", 1))


async def test_the_actor_teaches_once_it_has_sampled_all_responses(tmp_path: Path) -> None:
    run = taught(tmp_path, "actor")
    await run.trainer.fit()
    assert run.log.order(("end", "actor.generate", 1), ("begin", "actor.teacher_log_probs", 1))


async def test_a_teacher_on_the_critics_group_waits_for_its_update_and_one_on_the_reward_group_does_not(
    tmp_path: Path,
) -> None:
    for host, waits in (("critic", True), ("reward", False)):
        run = taught(tmp_path / host, host, run__schedule="overlap", run__total_steps=2)
        finish_update = run.log.hold("critic.update", at_step=1)
        fitting = asyncio.create_task(run.trainer.fit())
        await run.log.until("end", "scorer.score", 3)  # of the first part of step 2
        await run.log.until("end", "actor.generate", 2)
        if not waits:
            await run.log.until("end", "reward.teacher_log_probs", 2)
        assert run.log.happened("begin", f"{host}.teacher_log_probs", 2) is not waits
        finish_update.set()
        await fitting
        assert [row["step"] for row in run.metrics] == [1, 2]


# Rows.


async def test_a_group_that_also_computes_values_is_sent_each_part_once(tmp_path: Path) -> None:
    run = taught(tmp_path)
    await run.trainer.fit()
    assert run.critic.puts == [(1, PART), (1, PART), (1, {"returns"})]
    assert run.actor.puts == [(1, {"prompts", "seeds"}), (1, {"advantages"})]


async def test_groups_of_critic_and_teacher_are_each_sent_each_part_once(tmp_path: Path) -> None:
    run = taught(tmp_path, "reward")
    await run.trainer.fit()
    assert run.critic.puts == [(1, PART), (1, PART), (1, {"returns"})]
    assert run.reward.puts == [(1, PART), (1, PART)]


async def test_a_reward_model_and_a_teacher_share_a_group(tmp_path: Path) -> None:
    run = taught(tmp_path, "reward", reward_model__model="rm", placement__reward_model="reward")
    await run.trainer.fit()
    assert sorted(map(sorted, (columns for _, columns in run.reward.puts))) == sorted(
        [sorted(PART), sorted(PART), ["reward_tokens"], ["reward_tokens"]]
    )
    assert run.log.names().count("reward.reward_scores") == 2


@pytest.mark.parametrize("host", ["critic", "reward"])
@pytest.mark.parametrize(
    ("signal", "columns"), [("loss", {"teacher_log_probs"}), ("top_k", {"teacher_log_probs", *TOP})]
)
async def test_the_actor_gets_the_columns_of_a_signal_in_its_loss(
    tmp_path: Path, host: str, signal: str, columns: set[str]
) -> None:
    run = taught(tmp_path, host, teacher__signal=signal)
    await run.trainer.fit()
    puts = [put for _, put in run.actor.puts]
    assert sorted(map(sorted, puts)) == sorted(map(sorted, [{"prompts", "seeds"}, columns, {"advantages"}]))
    batch = await run.actor.get_batch(EXPERIENCE, ["responses", *columns])
    for response, row in zip(batch["responses"].rows(), batch["teacher_log_probs"].rows(), strict=True):
        np.testing.assert_allclose(row, -0.3 * response, rtol=1e-6)
    if signal == "top_k":
        for response, row in zip(batch["responses"].rows(), batch["teacher_top_ids"].rows(), strict=True):
            assert row.tolist() == np.repeat(response, 2).tolist()


@pytest.mark.parametrize("signal", ["advantage", "reward"])
async def test_other_signals_stay_with_the_controller(tmp_path: Path, signal: str) -> None:
    run = taught(tmp_path, teacher__signal=signal)
    await run.trainer.fit()
    assert not any("teacher_log_probs" in columns for _, columns in run.actor.puts)
    assert run.actor.terms[1] is not None
    assert not run.actor.terms[1].HasField("teacher_coef")


async def test_an_actor_that_hosts_the_teacher_has_the_columns_already(tmp_path: Path) -> None:
    run = taught(tmp_path, "actor", teacher__signal="top_k")
    await run.trainer.fit()
    assert run.actor.puts == [(1, {"prompts", "seeds"}), (1, {"advantages"})]


# Several teachers.


@pytest.mark.parametrize("host", ["actor", "critic", "reward"])
async def test_with_several_teachers_each_row_has_the_number_of_its_own(tmp_path: Path, host: str) -> None:
    run = taught(tmp_path, host, teacher__signal="loss", data__train_batch_size=6, **TWO)
    await run.trainer.fit()
    batch = await run.actor.get_batch(EXPERIENCE, ["responses", "teacher_log_probs"])
    rows = zip(batch["responses"].rows(), batch["teacher_log_probs"].rows(), strict=True)
    found = [round(float(row[0] / response[0] / -0.3)) for response, row in rows]
    drawn = run.trainer.rollouts.prompts.batch_at(1).rows
    assert found == [1 + (row.data_source == "b") for row in drawn for _ in range(2)]
    assert set(found) == {1, 2}
    assert all(key in run.metrics[0] for key in ("distillation/a/kl", "distillation/b/agreement"))


@pytest.mark.parametrize("host", ["actor", "critic", "reward"])
async def test_numbers_of_teachers_are_sent_only_where_there_are_several(tmp_path: Path, host: str) -> None:
    for changes in ({}, TWO):
        run = taught(tmp_path / str(len(changes)), host, **changes)
        await run.trainer.fit()
        sent = [columns for _, columns in host_of(run).puts]
        assert any("teachers" in columns for columns in sent) is bool(changes)


SAMPLED_OTHERWISE: dict[str, dict[str, Any]] = {
    "dynamic sampling": {
        "algorithm__filter_groups__enable": True,
        "rollout__stream_groups": 1,
        "reward_model__model": "rm",
    },
    "by a group of its own": {"services__rollout": {}},
    "by both groups": {"services__rollout": {}, "rollout__share": 0.5, "rollout__stream_groups": 4},
    "with a greedy baseline": {"algorithm__adv_estimator": "remax", "algorithm__use_kl_in_reward": True},
    "of older weights": {
        "rollout__staleness": 1,
        "rollout__stream_groups": 1,
        "algorithm__rollout_correction": {"rollout_is": "token"},
    },
}


@pytest.mark.parametrize("host", ["actor", "critic", "reward"])
@pytest.mark.parametrize("changes", SAMPLED_OTHERWISE.values(), ids=SAMPLED_OTHERWISE)
@pytest.mark.parametrize("schedule", ["serial", "overlap"])
async def test_however_rows_are_sampled_the_actor_has_those_of_their_teachers(
    tmp_path: Path, host: str, changes: dict[str, Any], schedule: Schedule
) -> None:
    if host == "critic" and "remax" in changes.values():
        return  # it starts no critic
    second = {"teacher__models": {"a": "models/second"}}  # of the rows that dynamic sampling keeps
    sections = {"teacher__signal": "top_k", "data__train_batch_size": 4, "run__schedule": schedule, **second, **changes}
    run = taught(tmp_path, host, tracking__dump_rollouts=True, **sections)
    await run.trainer.fit()
    lines = dumped(tmp_path)
    batch = await run.actor.get_batch(EXPERIENCE, ["responses", "teacher_log_probs", *TOP])
    numbers = [1 + (line["data_source"] == "a") for line in lines]
    assert 2 in numbers
    rows = (batch[name].rows() for name in ("responses", "teacher_log_probs"))
    for number, response, row in zip(numbers, *rows, strict=True):
        np.testing.assert_allclose(row, -0.3 * number * response, rtol=1e-6)
    for response, ids in zip(batch["responses"].rows(), batch["teacher_top_ids"].rows(), strict=True):
        assert ids.tolist() == np.repeat(response, 2).tolist()


# What is learned.


async def test_what_is_learned_does_not_depend_on_schedule_parts_or_host(tmp_path: Path) -> None:
    lines = []
    for schedule in SCHEDULES:
        for host in ("actor", "critic", "reward"):
            for num_parts in (1, 2):
                run = taught(
                    tmp_path / f"{schedule}_{host}_{num_parts}",
                    host,
                    run__schedule=schedule,
                    run__total_steps=3,
                    rollout__stream_groups=num_parts,
                    **TWO,
                )
                await run.trainer.fit()
                lines.append(learned(run))
    assert len(lines[0]) == 3
    assert {"distillation/kl", "distillation/agreement", "distillation/coef"} <= lines[0][0].keys()
    assert all(line == lines[0] for line in lines)


async def test_serial_makes_one_call_at_a_time(tmp_path: Path) -> None:
    run = taught(tmp_path, "actor", run__schedule="serial", checkpoint__save_last=False, rollout__stream_groups=1)
    await run.trainer.fit()
    assert run.log.most_at_once() == 1
    assert [name.partition(".")[2] for name in run.log.names()] == [
        *("generate", "old_log_probs", "teacher_log_probs", "values", "score", "update", "update"),
    ]


async def test_a_teacher_alone_asks_no_reward_function_and_all_scores_are_0(tmp_path: Path) -> None:
    run = taught(tmp_path, teacher__only=True, teacher__signal="reward")
    await run.trainer.fit()
    assert run.scorer.asked_functions == [False, False]
    assert [run.metrics[0][f"critic/score/{name}"] for name in ("mean", "max", "min")] == [0.0, 0.0, 0.0]
    # The k1 estimate: log-probs are -0.1 and -0.3 times a token.
    batch = await run.actor.get_batch(EXPERIENCE, ["responses"])
    assert run.metrics[0]["distillation/kl"] == pytest.approx(0.2 * batch["responses"].values.mean(), rel=1e-6)


async def test_with_a_teacher_functions_are_asked_as_before(tmp_path: Path) -> None:
    run = taught(tmp_path)
    await run.trainer.fit()
    assert run.scorer.asked_functions == [True, True]
    assert run.metrics[0]["critic/score/max"] > 0


@pytest.mark.parametrize("schedule", SCHEDULES)
async def test_the_kl_of_a_step_moves_the_weight_of_the_next_one(tmp_path: Path, schedule: Schedule) -> None:
    control = {"kl_ctrl": "adaptive", "kl_target": 0.01, "kl_horizon": 8, "coef": 0.5, "signal": "loss"}
    run = make_run(
        tmp_path,
        run__schedule=schedule,
        checkpoint__save_freq=1,
        teacher={"model": "models/teacher", **control},
        placement__teacher="critic",
    )
    await run.trainer.fit()
    # The KL is far above its target: four responses of a horizon of eight raise the weight by 0.2 * 4 / 8.
    expected = [0.5 * 1.1**step for step in range(4)]
    assert [terms.teacher_coef for terms in run.actor.terms.values() if terms] == pytest.approx(expected[:3])
    assert [row["distillation/coef"] for row in run.metrics] == pytest.approx(expected[:3])
    assert [run.store.load(step).state.teacher_coef for step in (1, 2, 3)] == pytest.approx(expected[1:])


async def test_each_update_has_the_weight_of_its_phase(tmp_path: Path) -> None:
    phases = [{"from_step": 2, "to_step": 2, "teacher_coef": 0.25}]
    run = taught(tmp_path, teacher__signal="loss", run__total_steps=3, algorithm__phases=phases)
    await run.trainer.fit()
    assert [terms.teacher_coef for terms in run.actor.terms.values() if terms] == [1.0, 0.25, 1.0]
