"""Token rewards, KL penalty and KL coefficient against numbers worked by hand and slow references."""

from __future__ import annotations

import math
from typing import get_args

import numpy as np
import pytest

from controller.ppo.kl import KL_ESTIMATORS, kl_divergence, next_kl_coef
from controller.ppo.token_rewards import penalise_kl, token_rewards
from splitppo.batch import Column
from splitppo.config import AlgorithmConfig
from splitppo.config.section import KlEstimator

pytestmark = pytest.mark.promise("formulas")

LOG_PROBS_BT = np.array([[-1.0, -2.0, np.nan], [-0.5, np.nan, np.nan], [np.nan] * 3, [-30.0, -1.0, -60.0]], np.float32)
REF_LOG_PROBS_BT = np.array([[-1.5, -1.0, np.nan], [-0.5, np.nan, 3], [np.nan] * 3, [-1.0, -2.0, -1.0]], np.float32)
MASK_BT = np.array([[1, 1, 0], [1, 0, 0], [0, 0, 0], [1, 0, 1]], bool)


def reference_kl(log_prob: float, ref_log_prob: float, kind: str) -> float:
    """k1 = lp - ref; abs; k2 = (lp - ref)^2 / 2; k3 = clamp(e^k - k - 1, +-10), k = clamp(ref - lp, +-20)."""
    difference = log_prob - ref_log_prob
    if kind in ("kl", "k1"):
        return difference
    if kind == "abs":
        return abs(difference)
    if kind in ("mse", "k2"):
        return difference**2 / 2
    k = min(max(-difference, -20.0), 20.0)
    return min(max(math.exp(k) - k - 1.0, -10.0), 10.0)


@pytest.mark.parametrize("kind", get_args(KlEstimator))
def test_kl_estimators_agree_with_their_formulas_and_are_zero_outside_the_mask(kind: str) -> None:
    kl_BT = kl_divergence(LOG_PROBS_BT, REF_LOG_PROBS_BT, MASK_BT, kl_penalty=kind)
    for index, inside in np.ndenumerate(MASK_BT):
        expected = (
            reference_kl(float(LOG_PROBS_BT[index]), float(REF_LOG_PROBS_BT[index]), kind.removesuffix("+"))
            if inside
            else 0.0
        )
        assert kl_BT[index] == pytest.approx(expected, rel=1e-12)


def test_the_configuration_names_exactly_these_estimators() -> None:
    assert {*KL_ESTIMATORS, *(f"{name}+" for name in KL_ESTIMATORS)} == set(get_args(KlEstimator))
    with pytest.raises(ValueError, match="Input should be 'kl', 'k1', 'abs', 'mse', 'k2', 'low_var_kl', 'k3'"):
        AlgorithmConfig.model_validate({"kl_penalty": "k4"})


def rewards_of(scores: list[float], kept: list[list[int]]) -> list[list[float]]:
    nothing_placed = Column.from_rows([[]] * len(scores), np.dtype(np.float32))
    rewards = token_rewards(np.array(scores), nothing_placed, Column.from_rows(kept, np.dtype(bool)))
    assert rewards.values.dtype == np.float32
    return [row.tolist() for row in rewards.rows()]


def test_the_score_sits_on_the_last_token_inside_the_mask() -> None:
    kept = [[1, 1, 1], [1, 0, 0], [1, 0, 1], [1, 1]]
    assert rewards_of([1.0, 2.0, 3.0, 4.0], kept) == [[0, 0, 1], [2, 0, 0], [0, 0, 3], [0, 4]]


def test_a_response_without_tokens_gets_its_score_nowhere() -> None:
    assert rewards_of([7.0, 5.0, 1.0, 2.0], [[], [0, 0, 0], [1, 1, 0], []]) == [[], [0, 0, 0], [0, 1, 0], []]


@pytest.mark.parametrize("kept", [[[], []], [], [[0], [0, 0]]])
def test_a_batch_without_any_token_has_no_rewards(kept: list[list[int]]) -> None:
    assert rewards_of([1.0] * len(kept), kept) == kept


def test_the_penalty_is_subtracted_from_every_token_and_the_kl_of_a_row_is_its_mean() -> None:
    # k1 is 0.5 and -1 in row 0 (mean -0.25), 0 in row 1, nothing in row 2, -29 and -59 in row 3 (mean -44).
    scores_BT = np.array([[0, 1, np.nan], [1, 0, 0], [0, 0, 0], [0, 0, 2]], np.float32)
    kl_BT = kl_divergence(LOG_PROBS_BT, REF_LOG_PROBS_BT, MASK_BT, kl_penalty="kl")
    rewards_BT, kl_B = penalise_kl(scores_BT, kl_BT, MASK_BT, kl_coef=0.1)
    np.testing.assert_allclose(rewards_BT, [[-0.05, 1.1, 0], [1, 0, 0], [0, 0, 0], [2.9, 0, 7.9]], rtol=1e-6)
    np.testing.assert_allclose(kl_B, [-0.25, 0, 0, -44])


def adaptive(target: float = 0.1, horizon: int = 1000) -> AlgorithmConfig:
    return AlgorithmConfig.model_validate({"kl_ctrl": "adaptive", "kl_target": target, "kl_horizon": horizon})


@pytest.mark.parametrize(
    ("current_kl", "factor"),
    [
        (0.1, 1.0),  # on target
        (0.11, 1.0 + 0.1 * 256 / 1000),
        (0.5, 1.0 + 0.2 * 256 / 1000),  # error clipped
        (0.095, 1.0 - 0.05 * 256 / 1000),
        (-3.0, 1.0 - 0.2 * 256 / 1000),  # the k1 estimate may be negative
    ],
)
def test_the_adaptive_coefficient_moves_as_in_ziegler_2019(current_kl: float, factor: float) -> None:
    assert next_kl_coef(adaptive(), 0.02, current_kl, num_samples=256) == pytest.approx(0.02 * factor)


def test_the_fixed_coefficient_never_moves() -> None:
    fixed = AlgorithmConfig.model_validate({"kl_ctrl": "fixed"})
    assert next_kl_coef(fixed, 0.02, 99.0, num_samples=256) == 0.02


def test_an_adaptive_coefficient_is_not_moved_by_a_step_without_kl_and_refuses_a_kl_that_is_not_finite() -> None:
    assert next_kl_coef(adaptive(), 0.02, None, num_samples=256) == 0.02
    with pytest.raises(ValueError, match="finite KL, got nan"):
        next_kl_coef(adaptive(), 0.02, math.nan, num_samples=256)
