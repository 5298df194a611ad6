"""The check of the rollout backend's log-probs: when it compares, its messages, and a step without it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from controller.step.log_prob_check import LogProbCheck, RolloutMismatch
from splitppo.config.sections.rollout import RolloutConfig
from tests.support.fake_run import make_run

DIFFERENCE = "training/rollout_log_probs_diff_max"


def check(*, first_step: int = 1, **keys: Any) -> LogProbCheck:
    bounds = {"max_log_prob_diff": 0.5, "max_mean_log_prob_diff": 0.2}
    return LogProbCheck(RolloutConfig.model_validate({**bounds, **keys}), first_step=first_step)


def measured(largest: float, mean: float = 0.125) -> dict[str, float]:
    return {DIFFERENCE: largest, "training/rollout_log_probs_diff_mean": mean}


# When, and what it says.


@pytest.mark.parametrize(
    ("check_freq", "first_step", "due"), [(0, 1, []), (1, 1, [1, 2, 3, 4, 5, 6, 7]), (3, 1, [1, 3, 6]), (3, 5, [5, 6])]
)
def test_the_first_step_of_a_life_and_every_nth_step_are_compared(
    check_freq: int, first_step: int, due: list[int]
) -> None:
    checked = check(check_freq=check_freq, first_step=first_step)

    assert [step for step in range(first_step, 8) if checked.is_due(step)] == due


@pytest.mark.parametrize("largest", [0.75, float("inf"), float("nan")])
def test_a_difference_over_the_bound_is_one_sentence_with_step_number_bound_and_key(largest: float) -> None:
    with pytest.raises(RolloutMismatch) as caught:
        check(check_freq=1).check(4, measured(largest))

    sentence = str(caught.value)
    assert sentence.startswith("step 4: log-probs of the rollout backend and the trainer differ by up to")
    for part in (f"{largest:.3g} nats (mean 0.125)", "allowed are 0.5 (rollout.max_log_prob_diff)", "weights"):
        assert part in sentence
    assert "\n" not in sentence


@pytest.mark.parametrize("mean", [0.25, float("nan")])
def test_a_mean_over_its_bound_ends_the_run_although_no_token_is_far_off(mean: float) -> None:
    with pytest.raises(RolloutMismatch, match=r"allowed are 0\.2 \(rollout\.max_mean_log_prob_diff\)"):
        check(check_freq=1).check(1, measured(0.5, mean))


def test_a_difference_up_to_the_bound_is_logged_with_largest_and_mean(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        check(check_freq=1).check(1, measured(0.5))

    assert (
        "step 1: log-probs of the rollout backend and the trainer differ by up to 0.5 nats (mean 0.125)" in caplog.text
    )


def test_steps_that_are_not_due_and_steps_without_tokens_pass() -> None:
    check(check_freq=2).check(3, measured(9.0))
    check(check_freq=1).check(1, {})


# In the trainer.


async def test_an_engine_that_is_off_ends_the_run_before_anything_is_updated(tmp_path: Path) -> None:
    run = make_run(tmp_path, rollout__check_freq=1, rollout__max_log_prob_diff=0.2)
    run.actor.rollout_offsets = {2: -0.25}

    with pytest.raises(RolloutMismatch, match=r"step 2: .* up to 0\.25 nats \(mean 0\.25\) .* allowed are 0\.2"):
        await run.trainer.fit()
    await run.trainer.abandon()

    assert (run.actor.committed_step, run.critic.committed_step) == (1, 1)


async def test_an_engine_that_is_right_goes_on_and_the_difference_is_a_metric(tmp_path: Path) -> None:
    run = make_run(tmp_path, rollout__check_freq=1, rollout__max_log_prob_diff=0.2, rollout__max_mean_log_prob_diff=0.2)
    run.actor.rollout_offsets = {3: 0.125}

    await run.trainer.fit()

    rows = run.metrics
    assert [row[DIFFERENCE] for row in rows] == pytest.approx([0.0, 0.0, 0.125], abs=1e-6)
    assert [row["training/rollout_log_probs_diff_mean"] for row in rows] == pytest.approx([0.0, 0.0, 0.125], abs=1e-6)
    assert all("rollout_corr/k3_kl" in row for row in rows)


async def test_a_step_that_is_not_checked_may_be_off(tmp_path: Path) -> None:
    run = make_run(tmp_path, rollout__check_freq=3, rollout__max_log_prob_diff=0.2)
    run.actor.rollout_offsets = {2: 9.0}

    await run.trainer.fit()

    assert run.actor.committed_step == 3


async def test_the_first_step_after_a_restore_is_checked(tmp_path: Path) -> None:
    run = make_run(tmp_path, at_step=1, rollout__check_freq=10, rollout__max_log_prob_diff=0.2)
    run.actor.rollout_offsets = {2: 9.0}

    with pytest.raises(RolloutMismatch, match="step 2"):
        await run.trainer.fit()
    await run.trainer.abandon()


async def test_only_checked_steps_compute_log_probs_where_the_update_needs_none(tmp_path: Path) -> None:
    run = make_run(tmp_path, rollout__check_freq=2)

    await run.trainer.fit()

    computed = [(name, step) for what, name, step in run.log.events if what == "end" and "old_log" in name]
    assert computed == [("actor.old_log_probs", 1), ("actor.old_log_probs", 2)]
    assert [DIFFERENCE in row for row in run.metrics] == [True, True, False]


# Rollout correction in the trainer.


async def test_correction_sends_weights_to_the_actor_and_the_mask_to_both(tmp_path: Path) -> None:
    correction = {"rollout_is": "token", "rollout_rs": "token_k1", "rollout_rs_threshold": 2.0}
    run = make_run(tmp_path, run__total_steps=1, rollout__check_freq=0, algorithm__rollout_correction=correction)
    run.actor.rollout_offsets = {1: 0.125}

    await run.trainer.fit()

    assert (1, frozenset({"advantages", "response_mask", "rollout_is_weights"})) in run.actor.puts
    assert (1, frozenset({"returns", "response_mask"})) in run.critic.puts
    row = run.metrics[0]
    assert row["rollout_corr/rollout_is_mean"] == pytest.approx(0.8825, abs=1e-4)  # exp(-0.125)
    assert row["rollout_corr/rollout_rs_masked_fraction"] == 0.0


async def test_a_step_whose_tokens_are_all_rejected_learns_nothing_and_goes_on(tmp_path: Path) -> None:
    correction = {"rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 0.01}
    run = make_run(tmp_path, algorithm__rollout_correction=correction)
    run.actor.rollout_offsets = {2: 5.0}

    await run.trainer.fit()

    assert (run.actor.committed_step, run.critic.committed_step) == (3, 3)
    rejected = [row["rollout_corr/rollout_rs_masked_fraction"] for row in run.metrics]
    assert rejected == [0.0, 1.0, 0.0]


async def test_without_correction_nothing_more_is_sent(tmp_path: Path) -> None:
    run = make_run(tmp_path, run__total_steps=1)

    await run.trainer.fit()

    assert (1, frozenset({"advantages"})) in run.actor.puts
    assert (1, frozenset({"returns"})) in run.critic.puts


# The rollout backend's log-probs as the old ones.


async def test_with_bypass_the_rollouts_log_probs_are_the_old_ones_whether_a_step_is_checked_or_not(
    tmp_path: Path,
) -> None:
    kl: dict[int, list[float]] = {}
    for check_freq in (0, 2):
        run = make_run(
            tmp_path / str(check_freq),
            actor__ppo_mini_batch_size=1,
            rollout__check_freq=check_freq,
            rollout__max_log_prob_diff=0.2,
            rollout__max_mean_log_prob_diff=0.2,
            algorithm__rollout_correction={"bypass_mode": True},
            algorithm__use_kl_in_reward=True,
        )
        run.actor.rollout_offsets = {2: 0.125, 3: 9.0}
        await run.trainer.fit()
        computed = [step for what, name, step in run.log.events if what == "end" and name == "actor.old_log_probs"]
        assert computed == ([1, 2] if check_freq else [])  # the first and every second
        assert [step for step, columns in run.actor.puts if columns == {"advantages", "old_log_probs"}] == [1, 2, 3]
        kl[check_freq] = [row["actor/reward_kl_penalty"] for row in run.metrics]

    assert kl[0] == kl[2]
    assert kl[0][2] > 5.0 > kl[0][1]  # of what has sampled, 9 nats off in step 3


async def test_with_bypass_a_backend_that_is_off_is_found_in_the_first_step(tmp_path: Path) -> None:
    correction = {"bypass_mode": True}
    run = make_run(tmp_path, rollout__check_freq=100, algorithm__rollout_correction=correction)
    run.actor.rollout_offsets = {1: 9.0}

    with pytest.raises(RolloutMismatch, match="step 1"):
        await run.trainer.fit()
    await run.trainer.abandon()
