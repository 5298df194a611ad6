"""GAE for long responses: the critic and the policy have different lambdas; the policy's may grow with the length."""

import numpy as np

from controller.ppo.advantages.arrays import AdvantagesAndReturns, check, float32
from controller.ppo.advantages.gae import discounted_deltas, gae
from controller.ppo.masked_stats import Float32s, Float64s, Mask


def configured_gae(
    rewards_BT: Float32s,
    values_BT: Float32s,
    mask_BT: Mask,
    *,
    gamma: float,
    lam: float,
    lam_critic: float | None = None,
    adaptive_lam_alpha: float | None = None,
) -> AdvantagesAndReturns:
    """Estimates advantages and returns by GAE: textbook GAE, unless one of the optional keys sets another lambda.

    With `lam_critic`, the returns have a lambda of their own (`decoupled_gae`). With `adaptive_lam_alpha`, the policy's
    lambda is `length_adaptive_lambda` instead of `lam`.
    """
    lam_critic = lam if lam_critic is None else lam_critic
    check(rewards_BT, mask_BT, lam, lam_critic)
    if adaptive_lam_alpha is None and lam_critic == lam:
        return gae(rewards_BT, values_BT, mask_BT, gamma=gamma, lam=lam)
    policy_lam = lam if adaptive_lam_alpha is None else length_adaptive_lambda(mask_BT, alpha=adaptive_lam_alpha)
    return decoupled_gae(rewards_BT, values_BT, mask_BT, gamma=gamma, lam=policy_lam, lam_critic=lam_critic)


def decoupled_gae(
    rewards_BT: Float32s,
    values_BT: Float32s,
    mask_BT: Mask,
    *,
    gamma: float,
    lam: float | Float64s,
    lam_critic: float,
) -> AdvantagesAndReturns:
    """Estimates advantages by GAE with `lam`, and returns by GAE with `lam_critic` (VC-PPO; Yuan et al., 2025).

    With a lam_critic of 1, the critic learns Monte-Carlo returns: a reward at the end reaches all tokens undiminished.
    """
    advantages_BT = discounted_deltas(rewards_BT, values_BT, mask_BT, gamma=gamma, lam=lam)
    towards_returns_BT = discounted_deltas(rewards_BT, values_BT, mask_BT, gamma=gamma, lam=lam_critic)
    return float32(advantages_BT, mask_BT), float32(towards_returns_BT + values_BT, mask_BT)


def length_adaptive_lambda(mask_BT: Mask, *, alpha: float) -> Float64s:
    """Computes the lambda of GAE for each response from its number of tokens l: [B].

    lam = max(0, 1 - 1 / (alpha * l))    (length-adaptive GAE; VAPO, Yue et al., 2025)
    """
    lengths_B = np.maximum(mask_BT.sum(axis=1), 1)
    return np.asarray(np.maximum(0.0, 1.0 - 1.0 / (alpha * lengths_B)))
