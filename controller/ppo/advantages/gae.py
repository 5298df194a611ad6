"""Estimates advantages token by token: GAE, and estimators that are GAE without values (REINFORCE++, ReMax)."""

import numpy as np

from controller.ppo.advantages.arrays import AdvantagesAndReturns, Rate, check, float32
from controller.ppo.masked_stats import Float32s, Float64s, Mask


def gae(rewards_BT: Float32s, values_BT: Float32s, mask_BT: Mask, *, gamma: Rate, lam: Rate) -> AdvantagesAndReturns:
    """Estimates advantages and returns of response tokens by GAE (Schulman et al., 2016, eq. 16), not whitened.

        delta_t  = r_t + gamma * V_{t+1} - V_t
        A_t      = delta_t + gamma * lam * A_{t+1}
        return_t = A_t + V_t

    V is the value of the state before a token. V and A are zero after the last token. Both factors lie in [0, 1].
    """
    advantages_BT = discounted_deltas(rewards_BT, values_BT, mask_BT, gamma=gamma, lam=lam)
    return float32(advantages_BT, mask_BT), float32(advantages_BT + values_BT, mask_BT)


def discounted_deltas(rewards_BT: Float32s, values_BT: Float32s, mask_BT: Mask, *, gamma: Rate, lam: Rate) -> Float64s:
    """Computes GAE's advantages as [B, T] float64, zero outside the mask.

    Raises:
        ValueError: shapes or types do not fit, or a factor lies outside [0, 1].
    """
    check(rewards_BT, mask_BT, gamma, lam)
    if values_BT.shape != mask_BT.shape:
        raise ValueError(f"values must have the shape of the rewards, {mask_BT.shape}, got {values_BT.shape}")
    # The tokens inside the mask move to the beginning of each row; zeros follow.
    dense_BT = np.arange(mask_BT.shape[1]) < mask_BT.sum(axis=1)[:, None]
    deltas_BT, dense_values_BT, gamma_BT, lam_BT = (np.zeros(mask_BT.shape) for _ in range(4))
    deltas_BT[dense_BT], dense_values_BT[dense_BT] = rewards_BT[mask_BT], values_BT[mask_BT]
    gamma_BT[dense_BT], lam_BT[dense_BT] = (np.broadcast_to(rate, mask_BT.shape)[mask_BT] for rate in (gamma, lam))
    deltas_BT[:, :-1] += gamma_BT[:, :-1] * dense_values_BT[:, 1:]
    deltas_BT -= dense_values_BT
    # The recursion goes from the last column to the first; each column is contiguous in this layout.
    advantages_TB = deltas_BT.T.copy()
    decay_TB = (gamma_BT * lam_BT).T.copy()
    for t in reversed(range(len(advantages_TB) - 1)):
        advantages_TB[t] += decay_TB[t] * advantages_TB[t + 1]
    advantages_BT = np.zeros(mask_BT.shape)
    advantages_BT[mask_BT] = advantages_TB.T[dense_BT]
    return advantages_BT


def reinforce_plus_plus(rewards_BT: Float32s, mask_BT: Mask, *, gamma: float) -> AdvantagesAndReturns:
    """Advantages of REINFORCE++ (Hu, 2025): the discounted reward-to-go, GAE without values, not whitened.

    A_t = r_t + gamma * A_{t+1}
    """
    return gae(rewards_BT, np.zeros_like(rewards_BT), mask_BT, gamma=gamma, lam=1.0)


def remax(rewards_BT: Float32s, mask_BT: Mask, *, greedy_scores_B: Float32s) -> AdvantagesAndReturns:
    """Advantages of ReMax (Li et al., 2024): reward-to-go less the score of a greedy response to the same prompt.

    return_t = r_t + return_{t+1}
    A_t      = return_t - greedy score
    """
    if greedy_scores_B.shape != mask_BT.shape[:1]:
        raise ValueError(f"greedy scores must have shape {mask_BT.shape[:1]}, got {greedy_scores_B.shape}")
    to_go_BT, _ = gae(rewards_BT, np.zeros_like(rewards_BT), mask_BT, gamma=1.0, lam=1.0)
    return float32(to_go_BT - greedy_scores_B[:, None].astype(np.float64), mask_BT), to_go_BT
