"""The estimator of `benchmarks.curves` that trains each context for itself."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.segment_rewards import reward_per_segment
from controller.ppo.advantages.arrays import turns_of
from controller.ppo.advantages.gae import gae
from controller.ppo.masked_stats import masked_whiten

# Two turns of two tokens with a context between them, and one turn; the reward is on the last token.
MASK = np.array([[1, 1, 0, 1, 1], [1, 1, 0, 0, 0]], np.bool_)
REWARDS = np.array([[0, 0, 0, 0, 1], [0, 0.5, 0, 0, 0]], np.float32)
VALUES = np.array([[0.25, 0.5, 0, 0.75, 0.5], [0.25, 0.25, 0, 0, 0]], np.float32)


def test_each_turn_ends_with_the_reward_of_the_episode() -> None:
    """By hand, with gamma 1 and lambda 0.5: A_2 = R - V_2, A_1 = V_2 - V_1 + A_2 / 2, in each turn."""
    advantages = np.array([[0.5, 0.5, 0, 0.0, 0.5], [0.125, 0.25, 0, 0, 0]], np.float32)
    whitened, returns = reward_per_segment(REWARDS, VALUES, MASK, turns_of(MASK), gamma=1.0, lam=0.5)
    assert whitened == pytest.approx(masked_whiten(advantages, MASK))
    assert returns == pytest.approx(np.where(MASK, advantages + VALUES, 0.0))


def test_with_a_lambda_of_one_it_is_the_advantage_over_the_whole_episode() -> None:
    of_episodes, returns = gae(REWARDS, VALUES, MASK, gamma=1.0, lam=1.0)
    of_segments = reward_per_segment(REWARDS, VALUES, MASK, turns_of(MASK), gamma=1.0, lam=1.0)
    assert of_segments[0] == pytest.approx(masked_whiten(of_episodes, MASK), abs=1e-6)
    assert of_segments[1] == pytest.approx(returns, abs=1e-6)
