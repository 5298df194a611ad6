"""Scores of tokens and steps: rewards, returns and critic targets, by hand and against a slow float64 reference.

The order is: raw score, scale, clip, KL penalty, whitening; then GAE, on values that the critic says on another scale.
"""

from __future__ import annotations

import math
import statistics
from typing import Any

import numpy as np
import pytest

from controller.ppo.experience import Experience, assemble_experience
from controller.ppo.normalization import Moments, Normalization, RunningMoments
from splitppo.batch import Batch, Column
from splitppo.config import AlgorithmConfig
from splitppo.config.subsections.reward_shaping import RewardShapingConfig
from tests.support.scores import make_scores
from tests.support.seeds import shifted

Rows = list[list[float]]
FLOAT32 = np.dtype(np.float32)


def algorithm(**keys: Any) -> AlgorithmConfig:
    return AlgorithmConfig.model_validate({"rollout_correction": {"bypass_mode": False}, **keys})


def column(rows: Rows) -> Column:
    return Column.from_rows(rows, FLOAT32)


def rows_of(values: Column) -> Rows:
    return [row.tolist() for row in values.rows()]


# By hand.


def test_gae_of_scores_on_tokens() -> None:
    rollouts = Batch.from_rows(prompts=[[1], [2]], responses=[[5, 6, 7], [5, 6]], values=[[0.5, 1.0, 0.25], [0.0, 2.0]])
    experience = assemble_experience(
        algorithm(gamma=0.5, lam=0.5),
        rollouts,
        make_scores(np.array([3.0, 1.0], np.float32), token_scores=column([[1.0, 0.0, 0.5], [0.0, 0.0]])),
        num_samples=1,
    )
    # Of 3, 1 and 0.5 are placed, and 1.5 is left for the end; the second response's score is all of its end.
    assert rows_of(experience.rewards) == [[1.0, 0.0, 2.0], [0.0, 1.0]]
    # Deltas: 1 + 0.5 * 1 - 0.5 = 1, 0 + 0.5 * 0.25 - 1 = -0.875, 2 - 0.25 = 1.75; 0 + 0.5 * 2 - 0 = 1, 1 - 2 = -1.
    # Advantages: 1.75, -0.875 + 0.25 * 1.75 = -0.4375, 1 - 0.25 * 0.4375 = 0.890625; -1, 1 - 0.25 = 0.75.
    assert rows_of(experience.batch["returns"]) == [[1.390625, 0.5625, 2.0], [0.75, 1.0]]
    assert experience.scores.tolist() == [3.0, 1.0]


def test_the_score_of_a_rejected_token_moves_on_else_back() -> None:
    responses = [[5, 6, 7, 8], [5, 6, 7], [5, 6], [5], []]
    mask = [[0, 1, 0, 1], [0, 1, 0], [0, 0], [1], []]
    rollouts = Batch.from_rows(prompts=[[1]] * 5, responses=responses, response_mask=mask)
    placed = column([[1.0, 2.0, 4.0, 8.0], [1.0, 2.0, 4.0], [1.0, 2.0], [0.0], []])
    scores = np.array([31.0, 15.0, 9.0, 3.0, 7.0], np.float32)  # 16, 8, 6, 3 and 7 at the ends
    experience = assemble_experience(
        algorithm(adv_estimator="rloo"), rollouts, make_scores(scores, token_scores=placed), num_samples=1
    )
    assert rows_of(experience.rewards) == [[0, 3, 0, 28], [0, 15, 0], [0, 0], [3], []]


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "reinforce_plus_plus_baseline"])
def test_groups_compare_the_sums_wherever_scores_are_placed(estimator: str) -> None:
    rollouts = Batch.from_rows(prompts=[[1]] * 4, responses=[[5, 6], [5, 6, 7], [5], [5, 6]])
    scores = np.array([1.0, 4.0, 2.0, 3.0], np.float32)
    placed = column([[0.5, 0.25], [-1.0, 0.0, 2.0], [0.0], [3.0, 0.0]])
    advantages = [
        assemble_experience(algorithm(adv_estimator=estimator), rollouts, given, num_samples=2).batch["advantages"]
        for given in (make_scores(scores), make_scores(scores, token_scores=placed))
    ]
    np.testing.assert_allclose(advantages[1].values, advantages[0].values, rtol=1e-6)


def test_every_part_of_a_score_is_scaled_and_clipped_by_itself_and_the_score_stays_as_it_was_given() -> None:
    rollouts = Batch.from_rows(prompts=[[1]] * 2, responses=[[5, 6, 7], [5, 6]])
    experience = assemble_experience(
        algorithm(adv_estimator="rloo"),
        rollouts,
        # 4.75 is left for the first end.
        make_scores(np.array([3.0, -9.0], np.float32), token_scores=column([[0.25, -4.0, 2.0], [0.0, 0.0]])),
        num_samples=2,
        normalization=Normalization(RewardShapingConfig(scale=2.0, clip_range=(-3.0, 5.0))),
    )
    assert rows_of(experience.rewards) == [[0.5, -3.0, 4.0 + 5.0], [0.0, -3.0]]
    assert experience.scores.tolist() == [3.0, -9.0]


def test_a_token_without_a_score_is_not_clipped_into_one() -> None:
    rollouts = Batch.from_rows(prompts=[[1]], responses=[[5, 6, 7]])
    experience = assemble_experience(
        algorithm(adv_estimator="reinforce_plus_plus"),
        rollouts,
        make_scores(np.array([3.0], np.float32), token_scores=column([[0.0, 0.25, 0.0]])),
        num_samples=1,
        normalization=Normalization(RewardShapingConfig(clip_range=(0.5, 2.0))),
    )
    assert rows_of(experience.rewards) == [[0.0, 0.5, 2.0]]


def test_the_score_of_a_greedy_response_is_shaped_as_that_which_it_is_compared_with() -> None:
    rollouts = Batch.from_rows(prompts=[[1]] * 4, responses=[[5], [5, 6], [5], [5]])
    experience = assemble_experience(
        algorithm(adv_estimator="remax"),
        rollouts,
        make_scores(np.array([0.5, 1.0, -4.0, 2.0], np.float32)),
        num_samples=2,
        greedy_scores_P=np.array([0.25, 9.0], np.float32),
        normalization=Normalization(RewardShapingConfig(scale=2.0, clip_range=(-5.0, 5.0))),
    )
    assert rows_of(experience.batch["advantages"]) == [[0.5], [1.5, 1.5], [-10.0], [-1.0]]


def test_the_running_deviation_is_that_of_all_scores_so_far() -> None:
    rollouts = Batch.from_rows(prompts=[[1]] * 2, responses=[[5], [5, 6]])
    shaping, running, seen = RewardShapingConfig(running_scale=True), RunningMoments(), list[float]()
    for scores in ([2.0, 2.0], [0.0, 1.0], [5.0, -3.0]):
        seen += scores
        experience = assemble_experience(
            algorithm(adv_estimator="rloo"),
            rollouts,
            make_scores(np.array(scores, np.float32)),
            num_samples=2,
            normalization=Normalization(shaping, running=running),
        )
        running, std = experience.running, statistics.pstdev(seen)
        assert experience.metrics["reward/running_std"] == pytest.approx(std, rel=1e-12)
        expected = [score / (std or 1.0) for score in scores]
        np.testing.assert_allclose(experience.rewards.sums(), expected, rtol=1e-6)
    assert running.scores.count == 6
    assert running.returns.count == 0


# Against a reference: plain Python floats, one token after the other.


def reference_step(
    *,
    scores: list[float],
    token_scores: Rows,
    kept: Rows,
    kl: Rows,
    values: Rows,
    shaping: RewardShapingConfig,
    seen_scores: list[float],
    seen_returns: list[float],
    kl_coef: float,
    gamma: float,
    lam: float,
) -> dict[str, Rows]:
    """A step of whose tokens all count and some were rejected; every response keeps one."""

    def shape(score: float) -> float:
        low, high = shaping.clip_range or (-math.inf, math.inf)
        return min(max(score * shaping.scale / statistics.pstdev([*seen_scores, *scores]), low), high)

    rewards: Rows = []
    for score, placed, row_kept, row_kl in zip(scores, token_scores, kept, kl, strict=True):
        row = [-kl_coef * k for k in row_kl]
        parts = [*enumerate(placed), (len(placed) - 1, score - math.fsum(placed))]
        for t, part in parts:
            after = [u for u in range(t, len(placed)) if row_kept[u]]
            row[after[0] if after else max(u for u in range(t) if row_kept[u])] += shape(part) if part else 0.0
        rewards.append(row)
    flat = [r for row in rewards for r in row]
    mean, std = statistics.fmean(flat), math.sqrt(statistics.variance(flat) + 1e-8)
    rewards = [[(r - mean) / std + mean for r in row] for row in rewards]

    old_mean, old_std = mean_and_std(seen_returns)
    values = [[v * old_std + old_mean for v in row] for row in values]
    returns: Rows = []
    for row_rewards, row_values, row_kept in zip(rewards, values, kept, strict=True):
        tokens, row, advantage, next_value = [t for t, k in enumerate(row_kept) if k], [0.0] * len(row_kept), 0.0, 0.0
        for t in reversed(tokens):
            advantage = row_rewards[t] + gamma * next_value - row_values[t] + gamma * lam * advantage
            row[t], next_value = advantage + row_values[t], row_values[t]
        returns.append(row)
    learned = [r for row, row_kept in zip(returns, kept, strict=True) for r, k in zip(row, row_kept, strict=True) if k]
    new_mean, new_std = mean_and_std([*seen_returns, *learned])

    def normalised(rows: Rows) -> Rows:
        pairs = (zip(row, row_kept, strict=True) for row, row_kept in zip(rows, kept, strict=True))
        return [[(x - new_mean) / new_std if k else 0.0 for x, k in pair] for pair in pairs]

    return {
        "rewards": rewards,
        "values": values,
        "returns": returns,
        "learned_values": normalised(values),
        "learned_returns": normalised(returns),
        "seen_returns": [learned],
        "scale": [[new_mean, new_std]],
    }


def mean_and_std(seen: list[float]) -> tuple[float, float]:
    return (statistics.fmean(seen), math.sqrt(max(statistics.pvariance(seen), 1e-2))) if seen else (0.0, 1.0)


def random_rows(random: np.random.Generator, lengths: list[int]) -> Rows:
    return [random.normal(size=length).astype(np.float32).tolist() for length in lengths]


def test_three_steps_of_everything_at_once_are_those_of_the_reference() -> None:
    random, lengths = np.random.default_rng(shifted(5)), [3, 1, 6, 2]
    shaping = RewardShapingConfig(scale=1.5, running_scale=True, clip_range=(-0.75, 1.25), whiten_rewards=True)
    config = algorithm(
        gamma=0.95,
        lam=0.9,
        use_kl_in_reward=True,
        kl_coef=0.3,
        rollout_correction={"bypass_mode": False, "rollout_rs": "token_k1", "rollout_rs_threshold": 2.0},
    )
    kept: Rows = [[1, 0, 1], [1], [0, 1, 1, 0, 1, 0], [1, 0]]
    running, seen_scores, seen_returns = RunningMoments(), list[float](), list[float]()
    for _ in range(3):
        old, kl, values = (random_rows(random, lengths) for _ in range(3))
        sampled = [
            [o + (0.0 if k else 3.0) for o, k in zip(*rows, strict=True)] for rows in zip(old, kept, strict=True)
        ]
        ref = [[o - d for o, d in zip(*rows, strict=True)] for rows in zip(old, kl, strict=True)]
        token_scores = random_rows(random, lengths)
        token_scores[1] = [0.0]
        scores = random.normal(size=4).astype(np.float32)
        rollouts = Batch.from_rows(
            prompts=[[1]] * 4,
            responses=[[7] * length for length in lengths],
            old_log_probs=old,
            rollout_log_probs=sampled,
            ref_log_probs=ref,
            values=values,
        )
        experience = assemble_experience(
            config,
            rollouts,
            make_scores(scores, token_scores=column(token_scores)),
            num_samples=2,
            normalization=Normalization(shaping, normalize_values=True, running=running),
        )
        expected = reference_step(
            scores=scores.tolist(),
            token_scores=token_scores,
            kept=kept,
            kl=kl,
            values=values,
            shaping=shaping,
            seen_scores=seen_scores,
            seen_returns=seen_returns,
            kl_coef=0.3,
            gamma=0.95,
            lam=0.9,
        )
        assert_is(experience, expected)
        running = RunningMoments.model_validate_json(experience.running.model_dump_json())
        assert running == experience.running
        seen_scores += scores.tolist()
        seen_returns += expected["seen_returns"][0]
    assert running.returns.count == 3 * 7


def assert_is(experience: Experience, expected: dict[str, Rows]) -> None:
    learned, [[mean, std]] = experience.critic_columns, expected["scale"]
    found = {
        "rewards": experience.rewards,
        "values": experience.batch["values"],
        "returns": experience.batch["returns"],
        "learned_values": learned["values"],
        "learned_returns": learned["returns"],
    }
    for name, values in found.items():
        np.testing.assert_allclose(values.values, column(expected[name]).values, rtol=2e-5, atol=2e-6, err_msg=name)
    assert experience.metrics["critic/value_norm/mean"] == pytest.approx(mean, rel=1e-5, abs=1e-6)
    assert experience.metrics["critic/value_norm/std"] == pytest.approx(std, rel=1e-5)


# Normalised values.


def step_of_values(normalize_values: bool, running: RunningMoments, values: Rows) -> Experience:
    rollouts = Batch.from_rows(prompts=[[1], [2]], responses=[[5, 6], [5]], values=values)
    return assemble_experience(
        algorithm(),
        rollouts,
        make_scores(np.array([10.0, 40.0], np.float32)),
        num_samples=1,
        normalization=Normalization(normalize_values=normalize_values, running=running),
    )


def test_a_critic_that_says_the_same_on_any_scale_gives_the_same_advantages() -> None:
    # mean 30, variance 200 of returns 10, 10, 40 and 60 others like them
    running = RunningMoments(returns=Moments(count=100, mean=30.0, squares=20_000.0))
    said = [[1.0, -0.5], [0.25]]
    plain = [[v * math.sqrt(200.0) + 30.0 for v in row] for row in said]
    scaled, straight = step_of_values(True, running, said), step_of_values(False, RunningMoments(), plain)
    for name in ("values", "advantages", "returns"):
        np.testing.assert_allclose(scaled.batch[name].values, straight.batch[name].values, rtol=1e-5)
    assert set(straight.critic_columns.columns) == {"returns"}
    assert set(scaled.critic_columns.columns) == {"values", "returns"}


def test_before_its_first_update_a_critic_speaks_on_the_scale_of_the_rewards() -> None:
    experience = step_of_values(True, RunningMoments(), [[1.0, 2.0], [3.0]])
    assert experience.batch["values"].values.tolist() == [1.0, 2.0, 3.0]
    # Returns 10, 10, 40: mean 20, variance 200.
    std = math.sqrt(200.0)
    np.testing.assert_allclose(experience.critic_columns["returns"].values, np.array([-10, -10, 20]) / std, rtol=1e-6)
    np.testing.assert_allclose(experience.critic_columns["values"].values, np.array([-19, -18, -17]) / std, rtol=1e-6)


def test_where_values_are_normalised_no_more_they_are_read_on_the_last_scale_once() -> None:
    running = RunningMoments(returns=Moments(count=4, mean=30.0, squares=800.0))
    last = step_of_values(False, running, [[0.0, 0.0], [0.0]])
    assert last.batch["values"].values.tolist() == [30.0] * 3
    assert last.running == RunningMoments()
    assert set(last.critic_columns.columns) == {"returns"}
