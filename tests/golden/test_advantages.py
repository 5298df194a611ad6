"""Advantage estimators against numbers worked by hand and against slow references that walk single tokens."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
from numpy.typing import NDArray

from controller.ppo.advantages import (
    ESTIMATORS,
    compute_advantages,
    gae,
    grpo,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    rloo,
    whiten_advantages,
)
from splitppo.config import AlgorithmConfig, Config
from splitppo.config.algorithm import NEEDS_VALUES

Rows = list[list[float]]


# Slow references: plain Python floats, one token after the other, formulas as in the papers.


def reference_gae(rewards: Rows, values: Rows, mask: Rows, gamma: float, lam: float) -> tuple[Rows, Rows]:
    """Schulman et al., 2016: A_t = sum_l (gamma lam)^l delta_{t+l} over the tokens inside the mask."""
    advantages, returns = [[0.0] * len(row) for row in mask], [[0.0] * len(row) for row in mask]
    for b, row_mask in enumerate(mask):
        tokens = [t for t, m in enumerate(row_mask) if m]
        deltas = []
        for k, t in enumerate(tokens):
            next_value = values[b][tokens[k + 1]] if k + 1 < len(tokens) else 0.0
            deltas.append(rewards[b][t] + gamma * next_value - values[b][t])
        for k, t in enumerate(tokens):
            advantages[b][t] = math.fsum((gamma * lam) ** j * delta for j, delta in enumerate(deltas[k:]))
            returns[b][t] = advantages[b][t] + values[b][t]
    return advantages, returns


def reference_whiten(values: Rows, mask: Rows) -> Rows:
    inside = [v for row, row_mask in zip(values, mask, strict=True) for v, m in zip(row, row_mask, strict=True) if m]
    mean, scale = statistics.fmean(inside), math.sqrt(statistics.variance(inside) + 1e-8)
    return [
        [(v - mean) / scale if m else 0.0 for v, m in zip(row, row_mask, strict=True)]
        for row, row_mask in zip(values, mask, strict=True)
    ]


def reference_group_advantages(rewards: Rows, mask: Rows, groups: list[int], kind: str) -> Rows:
    scores = [sum(r for r, m in zip(row, rm, strict=True) if m) for row, rm in zip(rewards, mask, strict=True)]
    advantages = []
    for score, group in zip(scores, groups, strict=True):
        peers = [s for s, g in zip(scores, groups, strict=True) if g == group]
        mean = statistics.fmean(peers) if len(peers) > 1 else 0.0
        if kind == "rloo":
            advantage = score - (sum(peers) - score) / (len(peers) - 1) if len(peers) > 1 else score
        elif kind == "grpo":
            advantage = (score - mean) / ((statistics.stdev(peers) if len(peers) > 1 else 1.0) + 1e-6)
        else:
            advantage = score - mean
        advantages.append(advantage)
    return [[a if m else 0.0 for m in row_mask] for a, row_mask in zip(advantages, mask, strict=True)]


def algorithm(name: str, **keys: float) -> AlgorithmConfig:
    return AlgorithmConfig.model_validate({"adv_estimator": name, **keys})


def batch(seed: int = 0) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.bool_], NDArray[np.int64]]:
    """Six rows of up to nine tokens: full, short, empty, with holes inside and at the end; NaN outside the mask."""
    rng = np.random.default_rng(seed)
    mask_BT = np.array(
        [
            [1, 1, 1, 1, 1, 1, 1, 1, 1],
            [1, 1, 1, 0, 0, 0, 0, 0, 0],
            [0, 0, 0, 0, 0, 0, 0, 0, 0],
            [1, 1, 0, 0, 1, 1, 0, 1, 1],
            [0, 1, 1, 0, 0, 0, 0, 0, 0],
            [1, 0, 0, 0, 0, 0, 0, 0, 0],
        ],
        bool,
    )
    rewards_BT, values_BT = rng.normal(size=(2, 6, 9)).astype(np.float32)
    rewards_BT[~mask_BT] = values_BT[~mask_BT] = np.nan
    return rewards_BT, values_BT, mask_BT, np.array([7, 7, 3, 7, 3, 5])


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.99, 0.95), (1.0, 0.0), (0.0, 1.0)])
def test_gae_agrees_with_the_token_by_token_reference(gamma: float, lam: float) -> None:
    rewards_BT, values_BT, mask_BT, _ = batch()
    advantages_BT, returns_BT = gae(rewards_BT, values_BT, mask_BT, gamma=gamma, lam=lam)
    expected_BT, expected_returns_BT = reference_gae(
        rewards_BT.tolist(), values_BT.tolist(), mask_BT.tolist(), gamma, lam
    )
    np.testing.assert_allclose(advantages_BT, expected_BT, rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(returns_BT, expected_returns_BT, rtol=1e-6, atol=1e-7)
    assert advantages_BT.dtype == returns_BT.dtype == np.float32


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


def test_gae_by_name_whitens_the_advantages_and_not_the_returns() -> None:
    rewards_BT, values_BT, mask_BT, groups_B = batch()
    of_gae = algorithm("gae", gamma=0.9, lam=0.8)
    raw_BT, returns_BT = compute_advantages(of_gae, rewards_BT, mask_BT, groups_B=groups_B, values_BT=values_BT)
    advantages_BT = whiten_advantages(of_gae, raw_BT, mask_BT)
    plain, plain_returns = reference_gae(rewards_BT.tolist(), values_BT.tolist(), mask_BT.tolist(), 0.9, 0.8)
    np.testing.assert_allclose(advantages_BT, reference_whiten(plain, mask_BT.tolist()), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(returns_BT, plain_returns, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", ["grpo", "rloo", "reinforce_plus_plus_baseline"])
def test_group_estimators_agree_with_the_row_by_row_reference(kind: str) -> None:
    rewards_BT, _, mask_BT, groups_B = batch()
    advantages_BT, returns_BT = {
        "grpo": lambda: grpo(rewards_BT, groups_B, mask_BT, norm_adv_by_std=True),
        "rloo": lambda: rloo(rewards_BT, groups_B, mask_BT),
        "reinforce_plus_plus_baseline": lambda: reinforce_plus_plus_baseline(rewards_BT, groups_B, mask_BT),
    }[kind]()
    expected_BT = reference_group_advantages(rewards_BT.tolist(), mask_BT.tolist(), groups_B.tolist(), kind)
    np.testing.assert_allclose(advantages_BT, expected_BT, rtol=1e-5, atol=1e-7)
    np.testing.assert_array_equal(returns_BT, advantages_BT)


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


def test_rloo_by_hand() -> None:
    # 1 - (0 + 5) / 2, 0 - (1 + 5) / 2, 5 - (1 + 0) / 2; a sample without peers keeps its score.
    rewards_BT, mask_BT = scores_on_last_token([1, 0, 5, 3])
    advantages_BT, _ = rloo(rewards_BT, np.array([0, 0, 0, 1]), mask_BT)
    np.testing.assert_allclose(advantages_BT[:, 0], [-1.5, -3.0, 4.5, 3.0])


def test_reinforce_plus_plus_by_hand_bridges_a_hole() -> None:
    # gamma = 0.5, tokens 0, 2, 3 count: returns are 1 + 0.5 * (2 + 0.5 * 4) = 3, 2 + 0.5 * 4 = 4, 4.
    returns_BT, _ = reinforce_plus_plus(
        np.array([[1, 9, 2, 4]], np.float32), np.array([[True, False, True, True]]), gamma=0.5
    )
    np.testing.assert_allclose(returns_BT, [[3, 0, 4, 4]])


@pytest.mark.parametrize("name", ["reinforce_plus_plus", "reinforce_plus_plus_baseline"])
def test_reinforce_plus_plus_by_name_is_whitened_over_the_batch(name: str) -> None:
    rewards_BT, _, mask_BT, groups_B = batch()
    raw_BT, returns_BT = compute_advantages(algorithm(name, gamma=0.9), rewards_BT, mask_BT, groups_B=groups_B)
    advantages_BT = whiten_advantages(algorithm(name), raw_BT, mask_BT)
    expected_BT = reference_whiten(returns_BT.astype(np.float64).tolist(), mask_BT.tolist())
    np.testing.assert_allclose(advantages_BT, expected_BT, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_every_estimator_is_zero_outside_the_mask_and_finite_inside(name: str) -> None:
    rewards_BT, values_BT, mask_BT, groups_B = batch()
    for result_BT in compute_advantages(algorithm(name), rewards_BT, mask_BT, groups_B=groups_B, values_BT=values_BT):
        assert result_BT.shape == mask_BT.shape
        assert result_BT.dtype == np.float32
        assert np.isfinite(result_BT).all()
        assert (result_BT[~mask_BT] == 0.0).all()


def test_gae_without_values_is_refused() -> None:
    rewards_BT, _, mask_BT, groups_B = batch()
    with pytest.raises(ValueError, match="needs values"):
        compute_advantages(algorithm("gae"), rewards_BT, mask_BT, groups_B=groups_B)


def test_shapes_and_factors_are_checked() -> None:
    rewards_BT, values_BT, mask_BT, groups_B = batch()
    with pytest.raises(ValueError, match=r"gamma and lam must lie in \[0, 1\]"):
        gae(rewards_BT, values_BT, mask_BT, gamma=1.1, lam=1.0)
    with pytest.raises(ValueError, match="values must have the shape"):
        gae(rewards_BT, values_BT[:, 1:], mask_BT, gamma=1.0, lam=1.0)
    with pytest.raises(ValueError, match=r"groups must have shape \(6,\), got \(5,\)"):
        rloo(rewards_BT, groups_B[1:], mask_BT)
    with pytest.raises(ValueError, match="the mask must be"):
        rloo(rewards_BT, groups_B, mask_BT.astype(np.uint8))


def test_the_configuration_names_exactly_these_estimators_and_starts_a_critic_where_one_reads_values() -> None:
    assert list(NEEDS_VALUES) == list(ESTIMATORS)
    for name, estimator in ESTIMATORS.items():
        assert Config.model_construct(algorithm=algorithm(name)).uses_critic == ("values_BT" in estimator.inputs)
    with pytest.raises(ValueError, match="expected one of gae, grpo, rloo"):
        algorithm("gea")
