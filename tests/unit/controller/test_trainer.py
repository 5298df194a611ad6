"""The dataflow of a step in every schedule: the order of the calls, and the data that is sent."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from controller.run.state import RunState
from splitppo.batch import Batch
from splitppo.config import Schedule
from splitppo.v1.actor_pb2 import LossTerms
from splitppo.v1.batch_pb2 import SLOT_KIND_EXPERIENCE, Slot
from tests.support.fake_run import make_run
from tests.support.fake_services import MAX_REWARD_LENGTH, FakeActor, FakeCritic

SCHEDULES: list[Schedule] = ["serial", "gather", "overlap"]
FIRST_EXPERIENCE = Slot(kind=SLOT_KIND_EXPERIENCE, step=1)

pytestmark = pytest.mark.usefixtures("no_task_is_left")


# The order of the dataflow.


async def test_serial_makes_one_call_at_a_time_in_the_order_of_the_dataflow(tmp_path: Path) -> None:
    run = make_run(
        tmp_path,
        run__schedule="serial",
        run__total_steps=2,
        algorithm__use_kl_in_reward=True,
        checkpoint__save_last=False,
    )
    await run.trainer.fit()
    assert run.log.most_at_once() == 1
    of_a_step = ["generate", "old_log_probs", "ref_log_probs", "values", "score", "update", "update"]
    assert [name.partition(".")[2] for name in run.log.names()] == of_a_step * 2


@pytest.mark.parametrize("schedule", ["gather", "overlap"])
async def test_log_probs_values_and_scores_run_at_the_same_time(tmp_path: Path, schedule: Schedule) -> None:
    run = make_run(tmp_path, run__schedule=schedule, run__total_steps=1, algorithm__use_kl_in_reward=True)
    run.log.meet("actor.old_log_probs", "critic.values", "scorer.score")
    await run.trainer.fit()
    assert run.log.order(("end", "actor.generate", 1), ("begin", "critic.values", 1), ("begin", "actor.update", 1))


class FetchesLate(FakeActor):
    """Its responses arrive when it has begun to compute log-probs of them."""

    async def get_batch(self, slot: Slot, columns: Sequence[str]) -> Batch:
        if "responses" in columns:
            await self.log.until("begin", "actor.old_log_probs", slot.step)
        return await super().get_batch(slot, columns)


@pytest.mark.parametrize("schedule", ["gather", "overlap"])
async def test_the_actor_computes_log_probs_while_the_controller_fetches_the_responses(
    tmp_path: Path, schedule: Schedule
) -> None:
    changes = {"run__schedule": schedule, "run__total_steps": 1, "algorithm__use_kl_in_reward": True}
    run = make_run(tmp_path, actor=FetchesLate, **changes)
    await run.trainer.fit()
    assert [row["step"] for row in run.metrics] == [1]


@pytest.mark.parametrize("schedule", ["gather", "overlap"])
async def test_the_actors_columns_are_sent_before_the_critics(tmp_path: Path, schedule: Schedule) -> None:
    arrived: list[str] = []

    class SlowToTake(FakeActor):
        async def put_batch(self, slot: Slot, batch: Batch) -> None:
            await super().put_batch(slot, batch)
            if "advantages" in batch:
                await asyncio.sleep(0.01)
                arrived.append("advantages")

    class Critic(FakeCritic):
        async def put_batch(self, slot: Slot, batch: Batch) -> None:
            await super().put_batch(slot, batch)
            if "returns" in batch:
                arrived.append("returns")

    run = make_run(tmp_path, actor=SlowToTake, critic=Critic, run__schedule=schedule, run__total_steps=2)
    await run.trainer.fit()
    assert arrived == ["advantages", "returns"] * 2


@pytest.mark.parametrize("schedule", ["gather", "overlap"])
async def test_both_updates_run_at_the_same_time(tmp_path: Path, schedule: Schedule) -> None:
    run = make_run(tmp_path, run__schedule=schedule, run__total_steps=2)
    run.log.meet("actor.update", "critic.update")
    await run.trainer.fit()
    assert (run.actor.committed_step, run.critic.committed_step) == (2, 2)


async def test_gather_joins_both_updates_before_the_next_step(tmp_path: Path) -> None:
    run = make_run(tmp_path, run__schedule="gather", run__total_steps=2)
    await run.trainer.fit()
    for update in ("actor.update", "critic.update"):
        assert run.log.order(("end", update, 1), ("begin", "actor.generate", 2))


async def test_overlap_generates_while_the_critic_still_updates_and_joins_it_before_the_values(tmp_path: Path) -> None:
    run = make_run(tmp_path, run__schedule="overlap", run__total_steps=2)
    finish_update = run.log.hold("critic.update", at_step=1)
    fitting = asyncio.create_task(run.trainer.fit())
    await run.log.until("end", "actor.generate", 2)
    await run.log.until("end", "scorer.score", 2)
    assert not run.log.happened("begin", "critic.values", 2)
    assert not run.metrics
    finish_update.set()
    await fitting
    assert run.log.order(("end", "critic.update", 1), ("begin", "critic.values", 2))
    assert [row["step"] for row in run.metrics] == [1, 2]


async def test_overlap_reports_a_step_when_the_critics_update_ends_not_when_the_next_step_needs_it(
    tmp_path: Path,
) -> None:
    run = make_run(tmp_path, run__schedule="overlap", run__total_steps=2)
    finish_update = run.log.hold("critic.update")
    finish_generation = run.log.hold("actor.generate", at_step=2)
    fitting = asyncio.create_task(run.trainer.fit())
    await run.log.until("begin", "actor.generate", 2)
    assert not run.metrics
    finish_update.set()
    await run.log.until("end", "critic.update", 1)
    for _ in range(100):  # turns of the event loop, until the reply has arrived
        await asyncio.sleep(0)
    assert [row["step"] for row in run.metrics] == [1]
    assert not run.log.happened("end", "actor.generate", 2)
    finish_generation.set()
    await fitting
    assert [row["step"] for row in run.metrics] == [1, 2]


async def test_overlap_writes_the_line_of_a_saved_step_after_its_checkpoint(tmp_path: Path) -> None:
    run = make_run(tmp_path, run__schedule="overlap", run__total_steps=2, checkpoint__save_freq=1)
    make_durable = run.log.hold("critic.save_checkpoint")
    fitting = asyncio.create_task(run.trainer.fit())
    await run.log.until("end", "actor.generate", 2)
    assert not run.metrics
    make_durable.set()
    await fitting
    assert [row["step"] for row in run.metrics] == run.store.steps() == [1, 2]


async def test_overlap_joins_the_last_steps_critic_before_it_ends(tmp_path: Path) -> None:
    run = make_run(tmp_path, run__schedule="overlap", run__total_steps=1)
    finish_update = run.log.hold("critic.update", at_step=1)
    fitting = asyncio.create_task(run.trainer.fit())
    await run.log.until("end", "actor.update", 1)
    assert not fitting.done()
    finish_update.set()
    await fitting
    assert run.critic.committed_step == 1
    assert "timing_s/stall_critic" in run.metrics[-1]


async def test_all_schedules_learn_from_the_same_numbers(tmp_path: Path) -> None:
    lines = []
    for schedule in SCHEDULES:
        run = make_run(tmp_path / schedule, run__schedule=schedule, algorithm__use_kl_in_reward=True)
        await run.trainer.fit()
        timed = ("timing", "perf/", "overlap/", "rpc/")
        lines.append([{k: v for k, v in row.items() if not k.startswith(timed)} for row in run.metrics])
    assert len(lines[0]) == 3
    assert lines[0] == lines[1] == lines[2]


# What is sent and what is left out.


@pytest.mark.parametrize(
    ("changes", "is_computed"),
    [
        ({}, False),
        ({"actor__ppo_epochs": 2}, True),
        ({"actor__ppo_mini_batch_size": 1}, True),
        ({"algorithm__use_kl_in_reward": True}, True),
        ({"actor__use_kl_loss": True}, False),
    ],
)
async def test_old_log_probs_are_computed_only_where_the_update_cannot_have_them_itself(
    tmp_path: Path, changes: dict[str, Any], is_computed: bool
) -> None:
    run = make_run(tmp_path, run__total_steps=1, **changes)
    await run.trainer.fit()
    assert ("actor.old_log_probs" in run.log.names()) is is_computed
    assert ("actor.ref_log_probs" in run.log.names()) is run.config.uses_reference


async def test_each_service_gets_only_what_it_lacks(tmp_path: Path) -> None:
    run = make_run(tmp_path, run__total_steps=1)
    await run.trainer.fit()
    assert run.actor.puts == [(1, {"prompts", "seeds"}), (1, {"advantages"})]
    assert run.critic.puts == [(1, {"prompts", "responses"}), (1, {"returns"})]


# What changes with the step.


async def test_each_update_is_asked_for_the_terms_of_its_phase(tmp_path: Path) -> None:
    phases = [
        {"from_step": 1, "to_step": 1, "name": "warm", "entropy_coeff": 0.5},
        {"from_step": 3, "use_kl_loss": True, "kl_loss_coef": 0.25},
    ]
    run = make_run(tmp_path, algorithm__phases=phases)
    await run.trainer.fit()
    plain = {"loss_mode": "vanilla", "entropy_coeff": 0.0, "use_kl_loss": False, "kl_loss_coef": 0.001, "phase": ""}
    assert run.actor.terms == {
        1: LossTerms(**plain | {"entropy_coeff": 0.5, "phase": "warm"}),
        2: LossTerms(**plain),
        3: LossTerms(**plain | {"use_kl_loss": True, "kl_loss_coef": 0.25, "phase": "steps 3 to the last"}),
    }
    assert [row["training/phase"] for row in run.metrics] == [1.0, 0.0, 2.0]
    computed = [step for what, name, step in run.log.events if (what, name) == ("end", "actor.ref_log_probs")]
    assert computed == [3]


async def test_a_phase_with_kl_in_the_reward_has_its_own_coefficient(tmp_path: Path) -> None:
    run = make_run(tmp_path, algorithm__phases=[{"from_step": 2, "use_kl_in_reward": True, "kl_coef": 0.5}])
    await run.trainer.fit()
    assert [row.get("actor/reward_kl_penalty_coeff") for row in run.metrics] == [None, 0.5, 0.5]
    assert "actor.old_log_probs" not in run.log.names(1)
    assert "actor.old_log_probs" in run.log.names(2)


@pytest.mark.parametrize("schedule", SCHEDULES)
async def test_the_entropy_of_an_update_moves_the_coefficient_of_the_next_one(
    tmp_path: Path, schedule: Schedule
) -> None:
    adaptive = {"enable": True, "target_entropy": 0.5, "entropy_coeff_delta": 0.25}
    run = make_run(tmp_path, run__schedule=schedule, algorithm__adaptive_entropy=adaptive, checkpoint__save_freq=1)
    run.actor.entropies = {1: 0.25, 2: 0.75, 3: 0.25}
    await run.trainer.fit()
    assert [terms.entropy_coeff for terms in run.actor.terms.values() if terms] == [0.0, 0.25, 0.0]
    assert [run.store.load(step).state.entropy_coeff for step in (1, 2, 3)] == [0.25, 0.0, 0.25]


async def test_a_step_whose_responses_are_all_cut_off_learns_nothing_and_the_run_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = make_run(tmp_path, data__max_response_length=1, algorithm__mask_truncated_completions=True)
    run.scorer.have_ended = False
    await run.trainer.fit()
    for client, column in ((run.actor, "advantages"), (run.critic, "returns")):
        batch = await client.get_batch(FIRST_EXPERIENCE, [column, "response_mask"])
        assert len(batch[column].values) == 4
        assert not batch[column].values.any()
        assert not batch["response_mask"].values.any()
    assert "0 of 4 response tokens are left to learn from: nothing is learned in this step" in caplog.text
    assert [row["step"] for row in run.metrics] == [1, 2, 3]


async def test_a_step_of_a_single_token_learns_nothing_and_the_run_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one_token = {
        "data__train_batch_size": 1,
        "rollout__n": 1,
        "actor__ppo_mini_batch_size": 1,
        "critic__ppo_mini_batch_size": 1,
    }
    run = make_run(tmp_path, data__max_response_length=1, **one_token)
    await run.trainer.fit()
    for client, column in ((run.actor, "advantages"), (run.critic, "returns")):
        batch = await client.get_batch(FIRST_EXPERIENCE, [column, "response_mask"])
        assert batch[column].values.tolist() == [0.0]
        assert batch["response_mask"].values.tolist() == [0]
    assert "1 of 1 response tokens are left to learn from: nothing is learned in this step" in caplog.text
    assert [row["step"] for row in run.metrics] == [1, 2, 3]


# The reference on the critic's group.


async def test_the_critic_is_sent_the_rows_once_for_values_and_reference(tmp_path: Path) -> None:
    run = make_run(tmp_path, run__total_steps=1, placement__reference="critic", algorithm__use_kl_in_reward=True)
    await run.trainer.fit()
    assert run.critic.puts == [(1, {"prompts", "responses"}), (1, {"returns"})]
    assert run.actor.puts == [(1, {"prompts", "seeds"}), (1, {"advantages"})]
    assert "critic.ref_log_probs" in run.log.names()
    assert "actor.ref_log_probs" not in run.log.names()


async def test_kl_in_the_loss_takes_the_critics_reference_to_the_actors_update(tmp_path: Path) -> None:
    run = make_run(tmp_path, run__total_steps=1, placement__reference="critic", actor__use_kl_loss=True)
    await run.trainer.fit()
    assert run.actor.puts == [(1, {"prompts", "seeds"}), (1, {"advantages", "ref_log_probs"})]


@pytest.mark.parametrize("schedule", SCHEDULES)
async def test_the_host_of_the_reference_changes_nothing_that_is_learned(tmp_path: Path, schedule: Schedule) -> None:
    lines = []
    for host in ("actor", "critic"):
        changes = {"run__schedule": schedule, "placement__reference": host, "algorithm__use_kl_in_reward": True}
        run = make_run(tmp_path / host, **changes)
        await run.trainer.fit()
        timed = ("timing", "perf/", "overlap/", "rpc/")
        lines.append([{k: v for k, v in row.items() if not k.startswith(timed)} for row in run.metrics])
        assert all("timing_s/ref" in row for row in run.metrics)
    assert len(lines[0]) == 3
    assert lines[0] == lines[1]


async def test_the_critics_reference_waits_for_its_update_as_the_values_do(tmp_path: Path) -> None:
    run = make_run(
        tmp_path,
        run__schedule="overlap",
        run__total_steps=2,
        placement__reference="critic",
        algorithm__use_kl_in_reward=True,
    )
    finish_update = run.log.hold("critic.update", at_step=1)
    fitting = asyncio.create_task(run.trainer.fit())
    await run.log.until("end", "actor.old_log_probs", 2)
    await run.log.until("end", "scorer.score", 2)
    assert not run.log.happened("begin", "critic.ref_log_probs", 2)
    assert not run.log.happened("begin", "critic.values", 2)
    finish_update.set()
    await fitting
    assert run.log.order(("end", "critic.update", 1), ("begin", "critic.ref_log_probs", 2))
    assert [row["step"] for row in run.metrics] == [1, 2]


# The reward model on the critic's group.


def dumped(run_dir: Path, split: str = "train") -> list[dict[str, Any]]:
    """The rollouts of all steps."""
    return [json.loads(line) for file in run_dir.glob(f"rollouts/{split}/*.jsonl") for line in file.open()]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("num_groups", [1, 2])
async def test_functions_and_reward_model_score_together(tmp_path: Path, schedule: Schedule, num_groups: int) -> None:
    coef = {"b": 2.0, "default": 10.0}
    run = make_run(
        tmp_path,
        run__schedule=schedule,
        rollout__stream_groups=num_groups,
        reward_model__model="rm",
        reward_model__coef=coef,
        tracking__dump_rollouts=True,
    )
    await run.trainer.fit()
    lines = dumped(tmp_path)
    assert len(lines) == 3 * 4
    for line in lines:
        assert (line["rule_score"] is None) is (line["data_source"] == "b")
        weighted = coef.get(line["data_source"], 10.0) * line["model_score"]
        assert line["score"] == pytest.approx((line["rule_score"] or 0.0) + weighted)
    assert all({"reward/model/mean", "timing_s/reward_model"} <= row.keys() for row in run.metrics)
    assert any("reward/rule/mean" in row for row in run.metrics)
    assert run.critic.puts.count((1, {"reward_tokens"})) == num_groups
    clip_ratios = [row["reward/model_clip_ratio"] for row in run.metrics]
    assert sum(clip_ratios) * 4 == sum(line["model_score"] == pytest.approx(0.1 * MAX_REWARD_LENGTH) for line in lines)
    assert 0 < sum(clip_ratios) < 3


@pytest.mark.parametrize("num_groups", [1, 2])
async def test_overlong_responses_are_punished_in_training_and_not_in_validation(
    tmp_path: Path, num_groups: int
) -> None:
    """A response's rule score is its length here; the limit is 4 tokens."""
    run = make_run(
        tmp_path,
        rollout__stream_groups=num_groups,
        reward__overlong_buffer={"enable": True, "len": 4, "penalty_factor": 2.0},
        reward_model__model="rm",
        reward_model__coef=0.0,
        tracking__dump_rollouts=True,
        validates=True,
        evaluation__test_freq=1,
    )
    await run.trainer.fit()
    lines = [line for line in dumped(tmp_path) if line["data_source"] == "a"]
    assert lines
    for line in lines:
        assert line["overlong_reward"] == pytest.approx(-2.0 * line["rule_score"] / 4)
        assert line["score"] == pytest.approx(line["rule_score"] + line["overlong_reward"])
    assert all(row["reward_extra/overlong/max"] == 1.0 for row in run.metrics)
    validated = dumped(tmp_path, "val")
    assert validated
    assert not any("overlong_reward" in line for line in validated)


async def test_without_a_reward_model_nothing_is_encoded_anew(tmp_path: Path) -> None:
    run = make_run(tmp_path, run__total_steps=1)
    await run.trainer.fit()
    assert "critic.reward_scores" not in run.log.names()
    assert not any(name.startswith(("reward/model", "reward/rule")) for name in run.metrics[0])


async def test_the_reward_model_waits_for_the_critics_update_and_functions_do_not(tmp_path: Path) -> None:
    run = make_run(tmp_path, run__schedule="overlap", run__total_steps=2, reward_model__model="rm")
    finish_update = run.log.hold("critic.update", at_step=1)
    fitting = asyncio.create_task(run.trainer.fit())
    await run.log.until("end", "scorer.score", 2)
    assert not run.log.happened("begin", "critic.reward_scores", 2)
    finish_update.set()
    await fitting
    assert run.log.order(("end", "critic.update", 1), ("begin", "critic.reward_scores", 2))


async def test_the_critics_warm_up_only_advances_the_actor(tmp_path: Path) -> None:
    run = make_run(tmp_path, critic__warmup_steps=2)
    await run.trainer.fit()
    assert run.actor.updates == [(1, True), (2, True), (3, False)]
    assert [step for step, columns in run.actor.puts if "advantages" in columns] == [3]
    assert run.critic.committed_step == 3


async def test_the_warm_up_has_passes_of_its_own(tmp_path: Path) -> None:
    run = make_run(tmp_path, critic__warmup_steps=2, critic__warmup_epochs=5)
    await run.trainer.fit()
    assert run.critic.num_epochs == [5, 5, 0]


# The values of the fake critic never change: after the first step nothing rises.
WARM_UP = {"critic__warmup_steps": 4, "critic__warmup_until": {"patience": 2}, "critic__warmup_epochs": 2}


@pytest.mark.parametrize("schedule", ["serial", "gather", "overlap"])
async def test_the_warm_up_ends_once_the_critic_explains_no_more_of_the_returns(tmp_path: Path, schedule: str) -> None:
    run = make_run(tmp_path, run__schedule=schedule, run__total_steps=5, **WARM_UP)
    await run.trainer.fit()
    assert run.actor.updates == [(1, True), (2, True), (3, True), (4, False), (5, False)]
    assert run.critic.num_epochs == [2, 2, 2, 0, 0]
    assert all("critic/mc_explained_var" in line for line in run.metrics)


async def test_a_resumed_run_ends_the_warm_up_at_the_same_step(tmp_path: Path) -> None:
    begun = make_run(tmp_path / "begun", run__total_steps=5, run__stop_after_step=2, **WARM_UP)
    await begun.trainer.fit()
    resumed = make_run(tmp_path / "resumed", run__total_steps=5, at_step=2, **WARM_UP)
    resumed.trainer.state = RunState.model_validate_json(begun.trainer.state.model_dump_json())
    await resumed.trainer.fit()
    assert resumed.actor.updates == [(3, True), (4, False), (5, False)]


async def test_the_warm_up_ends_at_the_latest_after_its_steps(tmp_path: Path) -> None:
    run = make_run(tmp_path, critic__warmup_steps=2, critic__warmup_until={"patience": 9})
    await run.trainer.fit()
    assert run.actor.updates == [(1, True), (2, True), (3, False)]


async def test_a_step_samples_with_the_rollouts_settings(tmp_path: Path) -> None:
    run = make_run(tmp_path, run__total_steps=1, rollout__temperature=0.5, rollout__top_k=7, rollout__top_p=0.75)
    await run.trainer.fit()
    (slot, sampling) = run.actor.sampling[0]
    assert slot == FIRST_EXPERIENCE
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.max_response_length) == (0.5, 7, 0.75, 4)


async def test_a_restored_run_goes_on_with_the_next_steps_prompts(tmp_path: Path) -> None:
    straight, resumed = make_run(tmp_path / "straight"), make_run(tmp_path / "resumed", at_step=2)
    await straight.trainer.fit()
    await resumed.trainer.fit()
    third, only = straight.metrics[2], resumed.metrics[0]
    assert resumed.actor.updates == [(3, False)]
    assert [only[key] for key in ("step", "critic/score/mean")] == [third[key] for key in ("step", "critic/score/mean")]
