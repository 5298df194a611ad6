"""Scores become rewards, advantages and returns: rows worked by hand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from controller.ppo import rollout_correction, token_rewards
from controller.ppo.advantages import estimate
from controller.ppo.advantages.registry import ESTIMATORS
from controller.ppo.experience import Experience, assemble_experience, monte_carlo_returns
from controller.ppo.normalization import NO_NORMALIZATION, Moments, Normalization, RunningMoments
from controller.ppo.scores import objects
from controller.tracking.step_metrics import learning_metrics
from splitppo.batch import Batch, Column
from splitppo.config.subsections.reward_shaping import RewardShapingConfig
from tests.support.fake_services import make_config
from tests.support.scores import make_scores
from tests.support.seeds import shifted

# Four responses to two prompts: of 3, 1, 0 and 2 tokens.
RESPONSES = [[5, 6, 7], [5], [], [5, 6]]
SCORES = np.array([1.0, 2.0, 3.0, 4.0], np.float32)


def assemble(
    tmp_path: Path,
    columns: dict[str, Any],
    *,
    num_samples: int = 2,
    greedy_scores: list[float] | None = None,
    extra: Sequence[dict[str, Any]] = ({}, {}, {}, {}),
    normalization: Normalization = NO_NORMALIZATION,
    **changes: Any,
) -> Experience:
    rollouts = Batch.from_rows(prompts=[[1], [1], [2, 3], [2, 3]], responses=RESPONSES, **columns)
    return assemble_experience(
        make_config(tmp_path, algorithm__kl_coef=0.5, **changes).algorithm,
        rollouts,
        make_scores(SCORES, extra=objects(extra)),
        num_samples=num_samples,
        greedy_scores_P=None if greedy_scores is None else np.array(greedy_scores, np.float32),
        normalization=normalization,
    )


def like_responses(number: float) -> list[list[float]]:
    return [[number] * len(row) for row in RESPONSES]


def test_the_score_sits_on_the_last_token_of_its_response(tmp_path: Path) -> None:
    experience = assemble(tmp_path, {}, algorithm__adv_estimator="grpo")
    assert experience.rewards.pad().tolist() == [[0, 0, 1], [2, 0, 0], [0, 0, 0], [0, 4, 0]]


def test_an_empty_response_gets_no_reward_anywhere(tmp_path: Path) -> None:
    experience = assemble(tmp_path, {"values": like_responses(0.0)})
    assert experience.rewards.values.sum() == 7.0
    assert [len(row) for row in experience.batch["advantages"].rows()] == [3, 1, 0, 2]


def test_holes_in_the_response_mask_get_no_reward_and_no_advantage(tmp_path: Path) -> None:
    mask = [[1, 0, 0], [1], [], [0, 1]]
    experience = assemble(tmp_path, {"response_mask": mask}, algorithm__adv_estimator="reinforce_plus_plus")
    assert experience.rewards.pad().tolist() == [[1, 0, 0], [2, 0, 0], [0, 0, 0], [0, 4, 0]]
    assert not experience.batch["advantages"].values[[1, 2, 4]].any()
    assert [len(row) for row in experience.batch["advantages"].rows()] == [3, 1, 0, 2]


def test_the_kl_is_subtracted_from_every_tokens_reward(tmp_path: Path) -> None:
    columns = {
        "old_log_probs": like_responses(-1.0),
        "ref_log_probs": like_responses(-1.25),
        "values": like_responses(0.0),
    }
    experience = assemble(tmp_path, columns, algorithm__use_kl_in_reward=True)
    # k1 is 0.25 nats on every token, times a coefficient of 0.5.
    assert experience.rewards.pad().tolist() == [[-0.125, -0.125, 0.875], [1.875, 0, 0], [0, 0, 0], [-0.125, 3.875, 0]]
    assert experience.kl == pytest.approx(0.25 * 3 / 4, abs=1e-6)  # the empty row counts as 0
    assert experience.metrics == {"actor/reward_kl_penalty": experience.kl, "actor/reward_kl_penalty_coeff": 0.5}


def test_without_kl_in_the_reward_there_is_no_kl(tmp_path: Path) -> None:
    experience = assemble(tmp_path, {"ref_log_probs": like_responses(-9.0)}, algorithm__adv_estimator="grpo")
    assert experience.kl is None
    assert experience.rewards.values.sum() == 7.0


def test_returns_with_gamma_and_lambda_one_are_the_rewards_to_go(tmp_path: Path) -> None:
    experience = assemble(tmp_path, {"values": like_responses(0.5)})
    returns = [row.tolist() for row in experience.batch["returns"].rows()]
    assert returns == [[1, 1, 1], [2], [], [4, 4]]


def test_gae_advantages_are_whitened_over_all_tokens_and_returns_are_not(tmp_path: Path) -> None:
    experience = assemble(tmp_path, {"values": like_responses(0.5)}, algorithm__lam=0.9)
    advantages = experience.batch["advantages"].values
    assert advantages.mean() == pytest.approx(0.0, abs=1e-6)
    assert advantages.std(ddof=1) == pytest.approx(1.0, abs=1e-6)
    assert experience.batch["returns"].values.mean() > 1.0


def test_neighbouring_rows_are_the_samples_of_one_prompt(tmp_path: Path) -> None:
    experience = assemble(tmp_path, {}, algorithm__adv_estimator="grpo", algorithm__norm_adv_by_std_in_grpo=False)
    # Rows 0 and 1 have scores 1 and 2; rows 2 and 3 have 0 (no token to put it on) and 4.
    assert [row.tolist() for row in experience.batch["advantages"].rows()] == [[-0.5] * 3, [0.5], [], [2.0] * 2]


def test_remax_takes_the_greedy_score_of_a_responses_prompt_off_its_reward_to_go(tmp_path: Path) -> None:
    experience = assemble(tmp_path, {}, greedy_scores=[0.25, 3.0], algorithm__adv_estimator="remax")
    assert [row.tolist() for row in experience.batch["advantages"].rows()] == [[0.75] * 3, [1.75], [], [1.0] * 2]
    assert [row.tolist() for row in experience.batch["returns"].rows()] == [[1.0] * 3, [2.0], [], [4.0] * 2]


def test_greedy_scores_are_scaled_and_clipped_as_scores_are(tmp_path: Path) -> None:
    shaping = Normalization(RewardShapingConfig(scale=2.0, clip_range=(0.0, 5.0)))
    experience = assemble(
        tmp_path, {}, greedy_scores=[0.25, 3.0], normalization=shaping, algorithm__adv_estimator="remax"
    )
    assert [row.tolist() for row in experience.batch["advantages"].rows()] == [[1.5] * 3, [3.5], [], [0.0] * 2]


def test_gdpo_is_normalised_over_responses_however_long_they_are(tmp_path: Path) -> None:
    changes = {"algorithm__adv_estimator": "gdpo", "algorithm__gdpo_reward_keys": ["right", "short"]}
    extra = [{"right": right, "short": short} for right, short in [(1, 0), (0, 4), (1, 0), (1, 0)]]
    experience = assemble(tmp_path, {}, extra=extra, algorithm__norm_adv_by_std_in_grpo=False, **changes)
    # 0.5 - 2 and 2 - 0.5 in the first group, 0 in the second; the empty response is not among the three that count.
    rows = [row.tolist() for row in experience.batch["advantages"].rows()]
    assert [len(row) for row in rows] == [3, 1, 0, 2]
    np.testing.assert_allclose([rows[0], [rows[1][0]] * 3, [rows[3][0]] * 3], np.outer([-1, 1, 0], np.ones(3)))


def test_gpg_is_scaled_by_the_share_of_responses_that_score_at_all(tmp_path: Path) -> None:
    # The score of the empty response has no place: three of four are not 0.
    experience = assemble(tmp_path, {}, algorithm__adv_estimator="gpg")
    rows = [row.tolist() for row in experience.batch["advantages"].rows()]
    expected = [[-0.5 * 4 / 3] * 3, [0.5 * 4 / 3], [], [2.0 * 4 / 3] * 2]
    assert rows == [pytest.approx(row) for row in expected]


# Rollout correction.

OFF = {"old_log_probs": like_responses(-1.0), "values": like_responses(0.5)}
# The trainer finds the last token of row 0, and row 1, far less likely than the rollout backend did.
ROLLOUT = [[-1.0, -1.0, 3.0], [3.0], [], [-1.0, -1.0]]


def test_a_rejected_token_gets_nothing_and_the_score_moves_to_the_last_one_that_is_left(tmp_path: Path) -> None:
    correction = {"rollout_rs": "token_k1", "rollout_rs_threshold": 2.0}
    experience = assemble(tmp_path, {**OFF, "rollout_log_probs": ROLLOUT}, algorithm__rollout_correction=correction)
    assert [row.tolist() for row in experience.batch["response_mask"].rows()] == [[1, 1, 0], [0], [], [1, 1]]
    assert experience.learned.pad().tolist() == [[1, 1, 0], [0, 0, 0], [0, 0, 0], [1, 1, 0]]
    assert experience.rewards.pad().tolist() == [[0, 1, 0], [2, 0, 0], [0, 0, 0], [0, 4, 0]]
    assert [row.tolist() for row in experience.batch["returns"].rows()] == [[1, 1, 0], [0], [], [4, 4]]
    advantages, learned = experience.batch["advantages"].values, experience.learned.values
    assert not advantages[~learned].any()
    assert advantages[learned].mean() == pytest.approx(0.0, abs=1e-6)  # whitened over what is learned from
    assert experience.metrics["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(2 / 6)


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "reinforce_plus_plus_baseline"])
def test_a_response_that_is_rejected_still_counts_in_its_groups_baseline(tmp_path: Path, estimator: str) -> None:
    correction = {"rollout_rs": "seq_max_k3", "rollout_rs_threshold": 1.0}
    rollout = [[-1.0] * 3, [3.0], [], [-1.0] * 2]
    columns = {"old_log_probs": like_responses(-1.0), "rollout_log_probs": rollout}
    changes = {"algorithm__adv_estimator": estimator, "algorithm__norm_adv_by_std_in_grpo": False}
    all_kept = assemble(tmp_path, columns, **changes)
    experience = assemble(tmp_path, columns, algorithm__rollout_correction=correction, **changes)
    assert experience.learned.sums().tolist() == [3, 0, 0, 2]
    if estimator == "reinforce_plus_plus_baseline":
        assert np.sign(experience.batch["advantages"].pad()[[0, 3], 0]).tolist() == [-1.0, 1.0]
    else:
        expected = np.where(experience.learned.values, all_kept.batch["advantages"].values, 0.0)
        np.testing.assert_array_equal(experience.batch["advantages"].values, expected)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("num_left", [0, 1])
def test_where_too_little_is_left_nothing_is_learned(tmp_path: Path, estimator: str, num_left: int) -> None:
    correction: Any = {"rollout_rs": "token_k2", "rollout_rs_threshold": 0.5}
    rollout = like_responses(-9.0)
    rollout[1] = [-1.0] * num_left or [-9.0]
    changes = {"algorithm__adv_estimator": estimator, "algorithm__rollout_correction": correction}
    if estimator == "gdpo":
        changes["algorithm__gdpo_reward_keys"] = ["score"]
    experience = assemble(tmp_path, {**OFF, "rollout_log_probs": rollout}, greedy_scores=[0.5, 0.5], **changes)
    for name in ("advantages", "returns", "response_mask"):
        assert not experience.batch[name].values.any()
    assert experience.rewards.values.sum() == 7.0


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("length", [0, 1])
def test_a_batch_of_a_single_token_or_none_is_not_learned_and_the_losses_leave_it_out(
    tmp_path: Path, estimator: str, length: int
) -> None:
    rows = [[0.5] * length, []]
    rollouts = Batch.from_rows(
        prompts=[[1], [1]], responses=[[5] * length, []], values=rows, old_log_probs=rows, ref_log_probs=rows
    )
    changes: dict[str, Any] = {"algorithm__gdpo_reward_keys": ["score"]} if estimator == "gdpo" else {}
    experience = assemble_experience(
        make_config(tmp_path, algorithm__adv_estimator=estimator, **changes).algorithm,
        rollouts,
        make_scores(np.array([3.0, 1.0], np.float32), extra=objects([{}, {}])),
        num_samples=2,
        greedy_scores_P=np.array([0.5], np.float32) if estimator == "remax" else None,
        normalization=Normalization(RewardShapingConfig(whiten_rewards=True), normalize_values=True),
    )
    for name in ("advantages", "returns"):
        assert experience.batch[name].values.tolist() == [0.0] * length
    if length:
        assert experience.batch["response_mask"].values.tolist() == [0]


# Responses that were cut off: the last one.

TRUNCATED = np.array([False, False, False, True])


def assemble_truncated(tmp_path: Path, columns: dict[str, Any], **changes: Any) -> Experience:
    rollouts = Batch.from_rows(prompts=[[1], [1], [2, 3], [2, 3]], responses=RESPONSES, **columns)
    algorithm = make_config(tmp_path, **changes).algorithm
    return assemble_experience(algorithm, rollouts, make_scores(SCORES, is_truncated=TRUNCATED), num_samples=2)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("num_left", [0, 1])
def test_where_all_conversations_are_lost_nothing_is_learned(tmp_path: Path, estimator: str, num_left: int) -> None:
    mask = [[0, 0, num_left], [0], [], [0, 0]]
    whiten = RewardShapingConfig(whiten_rewards=True)
    experience = assemble(
        tmp_path,
        {"response_mask": mask, "values": like_responses(0.0)},
        greedy_scores=[0.0, 0.0] if estimator == "remax" else None,
        normalization=Normalization(whiten),
        algorithm__adv_estimator=estimator,
        **({"algorithm__gdpo_reward_keys": ["score"]} if estimator == "gdpo" else {}),
    )
    assert not experience.learned.values.any()
    assert not experience.batch["advantages"].values.any()
    assert not experience.batch["returns"].values.any()


# A response of three turns, of 1, 2 and 1 tokens; two answers of the environment, of 1 and 2 tokens, and a reward of 1,
# 2 and 4 for the turns.
TURNS = [[1, 0, 1, 1, 0, 0, 1]]
TURN_REWARDS = [1.0, 0, 0, 2.0, 0, 0, 4.0]


def assemble_turns(tmp_path: Path, columns: dict[str, Any], **changes: Any) -> Experience:
    columns = {"values": [[0.0] * 7], "response_mask": TURNS, **columns}
    rollouts = Batch.from_rows(prompts=[[1]], responses=[list(range(7))], **columns)
    algorithm = make_config(tmp_path, **changes).algorithm
    placed = Column(np.array(TURN_REWARDS, np.float32), np.array([7], np.int32))
    scores = make_scores(np.array([7.0], np.float32), token_scores=placed)
    return assemble_experience(algorithm, rollouts, scores, num_samples=1)


@pytest.mark.parametrize(
    ("rates", "returns"),
    [
        ({}, [7, 0, 6, 6, 0, 0, 4]),
        ({"turn_gamma": 0.0}, [1, 0, 2, 2, 0, 0, 4]),
        ({"turn_gamma": 0.5}, [3, 0, 4, 4, 0, 0, 4]),
        ({"turn_gamma": 0.5, "gamma": 0.5}, [2, 0, 2, 4, 0, 0, 4]),
        ({"turn_gamma": 1.0, "gamma": 0.5}, [4, 0, 3, 6, 0, 0, 4]),
        ({"turn_lam": 0.0}, [1, 0, 2, 2, 0, 0, 4]),
    ],
)
def test_the_rewards_of_later_turns_count_by_the_rates_between_turns(
    tmp_path: Path, rates: dict[str, float], returns: list[float]
) -> None:
    experience = assemble_turns(tmp_path, {}, **{f"algorithm__{key}": rate for key, rate in rates.items()})
    assert experience.rewards.values.tolist() == TURN_REWARDS
    assert experience.batch["returns"].values.tolist() == returns


@pytest.mark.parametrize(
    "rates", [{}, {"turn_gamma": 0.6}, {"turn_gamma": 0.9, "turn_lam": 0.3, "lam_critic": 0.8}], ids=str
)
def test_advantages_lead_over_contexts_as_over_replies(tmp_path: Path, rates: dict[str, float]) -> None:
    """Beside float64, and beside the same turns with a reply of one token in the place of each context."""
    draws = np.random.default_rng(shifted(5))
    lengths = ([3, 5], [1, 1], [4, 12], [2, 3], [3, 0])  # of each turn, and of what follows it
    mask = [1 - hole for turn, follows in lengths for hole in [0] * turn + [1] * follows]
    short_mask = [1 - hole for turn, follows in lengths for hole in [0] * turn + [1] * min(follows, 1)]
    turns = np.repeat(np.arange(len(lengths)), [turn for turn, _ in lengths])
    values, rewards = draws.normal(size=(2, len(turns))).astype(np.float32)
    keys = {"gamma": 0.97, "lam": 0.9, **rates}

    def assembled(mask: list[int], segments: list[int]) -> Experience:
        at = np.flatnonzero(mask)
        of_tokens = np.zeros((2, len(mask)), np.float32)
        of_tokens[:, at] = values, rewards
        rollouts = Batch.from_rows(
            prompts=[[1]],
            responses=[list(range(len(mask)))],
            segments=[segments],
            response_mask=[mask],
            values=of_tokens[:1],
        )
        placed = Column(of_tokens[1], np.array([len(mask)], np.int32))
        scores = make_scores(np.array([rewards.sum()], np.float32), token_scores=placed)
        algorithm = make_config(tmp_path, **{f"algorithm__{key}": rate for key, rate in keys.items()}).algorithm
        return assemble_experience(algorithm, rollouts, scores, num_samples=1)

    long = assembled(mask, [3, 5, 14, 12])
    short = assembled(short_mask, [])
    advantages = gae_over_turns(rewards, values, turns, keys, keys["lam"], rates.get("turn_lam", keys["lam"]))
    lam_critic = rates.get("lam_critic", keys["lam"])  # from turn to turn, too
    returns = gae_over_turns(rewards, values, turns, keys, lam_critic, lam_critic) + values
    whitened = (advantages - advantages.mean()) / np.sqrt(advantages.var(ddof=1) + 1e-8)
    for made, own_mask in ((long, mask), (short, short_mask)):
        counts = np.array(own_mask, np.bool_)
        np.testing.assert_allclose(made.batch["returns"].values[counts], returns, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(made.batch["advantages"].values[counts], whitened, rtol=1e-5, atol=1e-5)
        assert not made.batch["advantages"].values[~counts].any()
    assert long.batch["segments"].values.tolist() == [3, 5, 14, 12]


def gae_over_turns(rewards: Any, values: Any, turns: Any, rates: dict[str, float], lam: float, turn_lam: float) -> Any:
    """GAE over the sampled tokens alone, in float64, with other rates from one turn to the next."""
    advantages = np.zeros(len(turns))
    next_value = next_advantage = 0.0
    for place in reversed(range(len(turns))):
        is_other_turn = place + 1 < len(turns) and turns[place + 1] != turns[place]
        gamma = rates.get("turn_gamma", rates["gamma"]) if is_other_turn else rates["gamma"]
        own_lam = turn_lam if is_other_turn else lam
        delta = float(rewards[place]) + gamma * next_value - float(values[place])
        next_advantage = delta + gamma * own_lam * next_advantage
        next_value = float(values[place])
        advantages[place] = next_advantage
    return advantages


def test_the_tokens_that_are_rejected_end_no_turn(tmp_path: Path) -> None:
    columns = {"old_log_probs": [[0.0] * 7], "rollout_log_probs": [[0.0, 0, -5, 0, 0, 0, 0]]}
    rejection = {"rollout_rs": "token_k1", "rollout_rs_threshold": "0.5_2.0", "bypass_mode": False}
    correction = {f"algorithm__rollout_correction__{key}": value for key, value in rejection.items()}
    experience = assemble_turns(tmp_path, columns, algorithm__turn_gamma=0.5, **correction)
    assert experience.learned.values.tolist() == [True, False, False, True, False, False, True]
    assert experience.batch["returns"].values.tolist() == [3, 0, 0, 4, 0, 0, 4]


def test_a_response_that_was_cut_off_is_learned_from_unless_it_is_masked(tmp_path: Path) -> None:
    columns = {"values": like_responses(0.5)}
    learned = assemble_truncated(tmp_path, columns)
    masked = assemble_truncated(tmp_path, columns, algorithm__mask_truncated_completions=True)
    assert "response_mask" not in learned.batch
    assert [row.tolist() for row in masked.batch["response_mask"].rows()] == [[1, 1, 1], [1], [], [0, 0]]
    assert [row.tolist() for row in masked.batch["returns"].rows()] == [[1, 1, 1], [2], [], [0, 0]]
    advantages = masked.batch["advantages"].values
    assert not advantages[-2:].any()
    assert advantages[:-2].mean() == pytest.approx(0.0, abs=1e-6)  # whitened over what is learned from
    assert set(masked.actor_columns().columns) == {"advantages", "response_mask"}
    assert set(masked.critic_columns.columns) == {"returns", "response_mask"}


@pytest.mark.parametrize("estimator", ["grpo", "rloo"])
def test_a_response_that_was_cut_off_still_counts_in_its_groups_baseline(tmp_path: Path, estimator: str) -> None:
    changes = {"algorithm__adv_estimator": estimator, "algorithm__norm_adv_by_std_in_grpo": False}
    learned = assemble_truncated(tmp_path, {}, **changes)
    masked = assemble_truncated(tmp_path, {}, algorithm__mask_truncated_completions=True, **changes)
    expected = np.where(masked.learned.values, learned.batch["advantages"].values, 0.0)
    np.testing.assert_array_equal(masked.batch["advantages"].values, expected)
    assert masked.rewards.values.tolist() == learned.rewards.values.tolist()


def test_cut_off_and_rejected_tokens_are_both_left_out(tmp_path: Path) -> None:
    correction = {"rollout_rs": "token_k1", "rollout_rs_threshold": 2.0}
    columns = {**OFF, "rollout_log_probs": ROLLOUT}
    changes = {"algorithm__rollout_correction": correction, "algorithm__mask_truncated_completions": True}
    experience = assemble_truncated(tmp_path, columns, **changes)
    assert [row.tolist() for row in experience.batch["response_mask"].rows()] == [[1, 1, 0], [0], [], [0, 0]]


def test_the_kl_in_the_reward_is_measured_on_all_tokens(tmp_path: Path) -> None:
    correction = {"rollout_rs": "token_k1", "rollout_rs_threshold": 2.0}
    columns = {**OFF, "rollout_log_probs": ROLLOUT, "ref_log_probs": like_responses(-1.25)}
    changes = {"algorithm__rollout_correction": correction, "algorithm__use_kl_in_reward": True}
    assert assemble(tmp_path, columns, **changes).kl == pytest.approx(0.25 * 3 / 4, abs=1e-6)


def test_weights_go_to_the_actor_alone_and_the_mask_to_both(tmp_path: Path) -> None:
    columns = {**OFF, "rollout_log_probs": like_responses(-1.5)}
    weighted = assemble(tmp_path, columns, algorithm__rollout_correction={"rollout_is": "token"})
    assert set(weighted.actor_columns().columns) == {"advantages", "rollout_is_weights"}
    assert set(weighted.critic_columns.columns) == {"returns"}
    np.testing.assert_allclose(weighted.batch["rollout_is_weights"].values, np.exp(0.5), rtol=1e-6)
    correction = {"rollout_rs": "token_k1", "rollout_rs_threshold": 2.0}
    masked = assemble(tmp_path, columns, algorithm__rollout_correction=correction)
    assert set(masked.actor_columns().columns) == {"advantages", "response_mask"}
    assert set(masked.critic_columns.columns) == {"returns", "response_mask"}


def test_without_correction_what_differs_is_measured_and_changes_nothing(tmp_path: Path) -> None:
    measured = assemble(tmp_path, {**OFF, "rollout_log_probs": ROLLOUT})
    plain = assemble(tmp_path, OFF)
    assert measured.metrics["training/rollout_log_probs_diff_max"] == 4.0
    assert plain.metrics == {}
    np.testing.assert_array_equal(measured.batch["advantages"].values, plain.batch["advantages"].values)
    assert set(measured.actor_columns().columns) == {"advantages"}


def test_correction_without_both_log_probs_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="rollout correction needs old_log_probs and rollout_log_probs"):
        assemble(tmp_path, OFF, algorithm__rollout_correction={"rollout_is": "token"})


def test_columns_of_the_rollouts_stay_beside_what_was_learned(tmp_path: Path) -> None:
    experience = assemble(tmp_path, {"values": like_responses(0.5)})
    assert set(experience.batch.columns) == {"prompts", "responses", "values", "advantages", "returns"}
    assert all(
        column.values.dtype == np.float32 for name, column in experience.batch.columns.items() if "p" not in name
    )
    assert experience.num_tokens == 6 + 6


def test_a_batch_of_several_blocks_is_what_its_rows_are_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (token_rewards, rollout_correction, estimate):
        monkeypatch.setattr(module, "_TOKENS", 1 << 14)
    random = np.random.default_rng(shifted(1))
    lengths = np.array([9_000, 21_000, 20, 12_000, 1, 18_000])
    rows = {name: [random.normal(size=n).astype(np.float32) for n in lengths] for name in ("old_log_probs", "values")}
    rows["ref_log_probs"] = [row - 0.1 for row in rows["old_log_probs"]]
    rows["rollout_log_probs"] = [row + 0.01 * random.normal(size=len(row)) for row in rows["old_log_probs"]]
    rollouts = Batch.from_rows(prompts=[[1]] * 6, responses=[np.arange(n) for n in lengths], **rows)
    algorithm = make_config(tmp_path, algorithm__use_kl_in_reward=True, algorithm__kl_coef=0.5).algorithm
    scores = np.arange(6, dtype=np.float32)
    together = assemble_experience(algorithm, rollouts, make_scores(scores), num_samples=2)
    for start in (0, 2, 4):
        pair = slice(start, start + 2)
        alone = assemble_experience(
            algorithm, rollouts.take(np.arange(6)[pair]), make_scores(scores[pair]), num_samples=2
        )
        for column, expected in (
            (together.rewards, alone.rewards),
            (together.batch["returns"], alone.batch["returns"]),
        ):
            np.testing.assert_array_equal(column.between(start, start + 2).values, expected.values)
    old, sampled = (np.concatenate(rows[name]).astype(np.float32) for name in ("old_log_probs", "rollout_log_probs"))
    p, q = np.exp(old.astype(np.float64)), np.exp(sampled.astype(np.float64))
    assert together.metrics["training/rollout_probs_diff_std"] == pytest.approx(np.abs(p - q).std(ddof=1))
    assert together.metrics["training/rollout_actor_probs_pearson_corr"] == pytest.approx(np.corrcoef(p, q)[0, 1])
    assert together.batch["advantages"].values.mean() == pytest.approx(0.0, abs=1e-6)
    assert together.batch["advantages"].values.std(ddof=1) == pytest.approx(1.0, abs=1e-5)


def sums_by_loop(experience: Experience, turns: list[list[int]], gamma: float, turn_gamma: float | None) -> list[float]:
    """The discounted sums of rewards of the learned tokens, token by token in float64."""
    found = []
    rows = zip(experience.rewards.rows(), experience.learned.rows(), turns, strict=True)
    for rewards, learned, turn in rows:
        places = np.flatnonzero(learned)
        for first, place in enumerate(places):
            total, factor, before = 0.0, 1.0, place
            for later in places[first:]:
                is_new_turn = turn_gamma is not None and turn[later] != turn[before]
                factor *= 1.0 if later == before else (turn_gamma if is_new_turn else gamma)
                total += factor * float(rewards[later])
                before = later
            found.append(total)
    return found


@pytest.mark.parametrize("turn_gamma", [None, 0.25])
@pytest.mark.parametrize("gamma", [1.0, 0.5])
@pytest.mark.parametrize(
    "rates",
    [{}, {"lam": 0.3}, {"lam_critic": 0.9, "lam": 0.5}, {"adaptive_lam_alpha": 0.5, "turn_lam": 0.1}],
    ids=["lam 1", "lam", "decoupled", "by length, by turns"],
)
def test_monte_carlo_returns_are_discounted_sums_of_the_rewards_whatever_lambda_and_values_are(
    tmp_path: Path, rates: dict[str, float], gamma: float, turn_gamma: float | None
) -> None:
    columns = {
        "values": [[0.5, -1.0, 2.0], [3.0], [], [1.0, 0.25]],
        "response_mask": [[1, 0, 1], [1], [], [1, 1]],
        "old_log_probs": like_responses(-1.0),
        "ref_log_probs": [[-1.5] * len(row) for row in RESPONSES],
    }
    keys = {f"algorithm__{name}": value for name, value in rates.items()}
    experience = assemble(
        tmp_path,
        columns,
        algorithm__use_kl_in_reward=True,
        algorithm__gamma=gamma,
        algorithm__turn_gamma=turn_gamma,
        normalization=Normalization(normalize_values=True, running=RunningMoments(returns=Moments(count=4, mean=1.0))),
        **keys,
    )
    turns = [[1, 0, 2], [1], [], [1, 1]]
    expected = sums_by_loop(experience, turns, gamma, turn_gamma)
    learned = experience.learned.values
    np.testing.assert_allclose(monte_carlo_returns(experience)[learned], expected, rtol=1e-12)
    values = experience.batch["values"].values[learned].astype(np.float64)  # on the scale of the rewards
    share = 1 - np.var(np.array(expected) - values) / (np.var(expected) + 1e-5)
    assert learning_metrics(experience)["critic/mc_explained_var"] == pytest.approx(share)
