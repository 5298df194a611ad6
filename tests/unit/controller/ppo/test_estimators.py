"""Estimators on numbers worked by hand, and refused input."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from controller.ppo.advantages.arrays import turns_of
from controller.ppo.advantages.decoupled_gae import configured_gae
from controller.ppo.advantages.gae import gae, reinforce_plus_plus, remax
from controller.ppo.advantages.groups import gdpo, grpo, grpo_passk, opo, rloo


def test_gae_by_hand_with_a_hole() -> None:
    # gamma = lam = 0.5; tokens 0 and 2 count, token 1 is tool output.
    # t = 2: delta = 1 - 0.4 = 0.6, A = 0.6. t = 0: delta = 0 + 0.5 * 0.4 - 0.2 = 0, A = 0 + 0.25 * 0.6 = 0.15.
    advantages_BT, returns_BT = gae(
        np.array([[0, 9, 1]], np.float32),
        np.array([[0.2, 9, 0.4]], np.float32),
        np.array([[True, False, True]]),
        gamma=0.5,
        lam=0.5,
    )
    np.testing.assert_allclose(advantages_BT, [[0.15, 0, 0.6]], rtol=1e-6)
    np.testing.assert_allclose(returns_BT, [[0.35, 0, 1.0]], rtol=1e-6)


def test_gae_by_length_by_hand() -> None:
    # alpha = 0.5: lam is 1 - 1 / (0.5 * 4) = 0.5 for four tokens, and max(0, 1 - 1 / (0.5 * 1)) = 0 for one.
    # Values 0, a reward of 8 on the last token: A halves with every token before it; the critic's lambda is 1.
    rewards_BT = np.array([[0, 0, 0, 8], [3, 0, 0, 0]], np.float32)
    mask_BT = np.array([[True] * 4, [True, False, False, False]])
    advantages_BT, returns_BT = configured_gae(
        rewards_BT, np.zeros((2, 4), np.float32), mask_BT, turns_of(mask_BT), gamma=1.0, lam=1.0, adaptive_lam_alpha=0.5
    )
    np.testing.assert_allclose(advantages_BT, [[1, 2, 4, 8], [3, 0, 0, 0]])
    np.testing.assert_allclose(returns_BT, [[8, 8, 8, 8], [3, 0, 0, 0]])


def scores_on_last_token(scores: list[float]) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    rewards_BT = np.zeros((len(scores), 2), np.float32)
    rewards_BT[:, 1] = scores
    return rewards_BT, np.ones((len(scores), 2), bool)


def test_grpo_by_hand() -> None:
    # Group 0: scores 1, 0, 2: mean 1, unbiased standard deviation 1. Group 1 has one sample: mean 0, deviation 1.
    rewards_BT, mask_BT = scores_on_last_token([1, 0, 5, 2])
    groups_B = np.array([0, 0, 1, 0])
    advantages_BT, _ = grpo(rewards_BT, groups_B, mask_BT, norm_adv_by_std=True)
    np.testing.assert_allclose(advantages_BT, [[0, 0], [-1, -1], [5, 5], [1, 1]], atol=1e-5)


def test_grpo_without_the_division_keeps_the_scale_of_the_scores() -> None:
    rewards_BT, mask_BT = scores_on_last_token([10, 30])
    advantages_BT, _ = grpo(rewards_BT, np.array([4, 4]), mask_BT, norm_adv_by_std=False)
    np.testing.assert_allclose(advantages_BT, [[-10, -10], [10, 10]])


def test_grpo_gives_zero_where_all_samples_score_the_same() -> None:
    rewards_BT, mask_BT = scores_on_last_token([0.1, 0.1, 0.1])
    advantages_BT, _ = grpo(rewards_BT, np.zeros(3, int), mask_BT, norm_adv_by_std=True)
    np.testing.assert_allclose(advantages_BT, np.zeros((3, 2)), atol=1e-6)


def test_only_the_best_of_a_group_learns_for_pass_at_k() -> None:
    # 5 is 4 better than the second best, 1; where two are best nobody is; a single sample has no second best.
    rewards_BT, mask_BT = scores_on_last_token([1, 0, 5, 3, 2, 2, 1])
    advantages_BT, _ = grpo_passk(rewards_BT, np.array([0, 0, 0, 1, 2, 2, 2]), mask_BT, norm_adv_by_std=False)
    np.testing.assert_allclose(advantages_BT[:, 0], [0, 0, 4, 0, 0, 0, 0])


def test_rloo_by_hand() -> None:
    # 1 - (0 + 5) / 2, 0 - (1 + 5) / 2, 5 - (1 + 0) / 2; a sample without peers keeps its score.
    rewards_BT, mask_BT = scores_on_last_token([1, 0, 5, 3])
    advantages_BT, _ = rloo(rewards_BT, np.array([0, 0, 0, 1]), mask_BT)
    np.testing.assert_allclose(advantages_BT[:, 0], [-1.5, -3.0, 4.5, 3.0])


def test_opo_by_hand() -> None:
    # Three of four tokens have the score 1: the baseline is 0.75.
    rewards_BT = np.array([[0, 0, 0], [0, 0, 1]], np.float32)
    mask_BT = np.array([[True, False, False], [True, True, True]])
    advantages_BT, _ = opo(rewards_BT, np.zeros(2, int), mask_BT)
    np.testing.assert_allclose(advantages_BT, [[-0.75, 0, 0], [0.25, 0.25, 0.25]])


def test_gdpo_tells_apart_what_has_the_same_sum() -> None:
    # Components (1, 0) and (0, 1) of one group have the same sum, which grpo sees nothing in; weights decide here.
    advantages_BT, _ = gdpo(
        np.zeros(2, int),
        np.ones((2, 1), bool),
        components_KB=np.array([[1, 0], [0, 1]], np.float32),
        component_weights_K=np.array([3.0, 1.0]),
        norm_adv_by_std=False,
    )
    np.testing.assert_allclose(advantages_BT[:, 0], [3 * 0.5 - 0.5, -3 * 0.5 + 0.5])


def test_reinforce_plus_plus_by_hand_bridges_a_hole() -> None:
    # gamma = 0.5, tokens 0, 2, 3 count: returns are 1 + 0.5 * (2 + 0.5 * 4) = 3, 2 + 0.5 * 4 = 4, 4.
    returns_BT, _ = reinforce_plus_plus(
        np.array([[1, 9, 2, 4]], np.float32), np.array([[True, False, True, True]]), gamma=0.5
    )
    np.testing.assert_allclose(returns_BT, [[3, 0, 4, 4]])


def test_remax_by_hand() -> None:
    # A KL penalty of 0.5 on each token and a score of 2 on the last: to go 1, 1.5; greedy decoding scores 1.
    advantages_BT, returns_BT = remax(
        np.array([[-0.5, 9, 1.5]], np.float32),
        np.array([[True, False, True]]),
        greedy_scores_B=np.array([1.0], np.float32),
    )
    np.testing.assert_allclose(returns_BT, [[1.0, 0, 1.5]])
    np.testing.assert_allclose(advantages_BT, [[0.0, 0, 0.5]])


def test_shapes_and_factors_are_checked() -> None:
    rewards_BT = values_BT = np.zeros((6, 9), np.float32)
    mask_BT, groups_B = np.ones((6, 9), bool), np.zeros(6, int)
    with pytest.raises(ValueError, match=r"gamma and lam must lie in \[0, 1\]"):
        gae(rewards_BT, values_BT, mask_BT, gamma=1.1, lam=1.0)
    with pytest.raises(ValueError, match="values must have the shape"):
        gae(rewards_BT, values_BT[:, 1:], mask_BT, gamma=1.0, lam=1.0)
    with pytest.raises(ValueError, match=r"groups must have shape \(6,\), got \(5,\)"):
        rloo(rewards_BT, groups_B[1:], mask_BT)
    with pytest.raises(ValueError, match="the mask must be"):
        rloo(rewards_BT, groups_B, mask_BT.astype(np.uint8))
    with pytest.raises(ValueError, match=r"greedy scores must have shape \(6,\), got \(2,\)"):
        remax(rewards_BT, mask_BT, greedy_scores_B=np.zeros(2, np.float32))
    with pytest.raises(ValueError, match=r"components must have shape \(2, 6\), got \(2, 5\)"):
        gdpo(
            groups_B,
            mask_BT,
            components_KB=np.zeros((2, 5), np.float32),
            component_weights_K=np.ones(2),
            norm_adv_by_std=True,
        )
