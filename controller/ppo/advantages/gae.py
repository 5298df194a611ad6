"""Estimators that go from token to token: GAE with its variants for long responses, REINFORCE++, ReMax."""

import numpy as np

from controller.ppo.advantages.arrays import AdvantagesAndReturns, check, float32
from controller.ppo.masked_stats import Float32s, Float64s, Mask


def gae(
    rewards_BT: Float32s,
    values_BT: Float32s,
    mask_BT: Mask,
    *,
    gamma: float,
    lam: float,
    lam_critic: float | None = None,
    adaptive_lam_alpha: float | None = None,
) -> AdvantagesAndReturns:
    """Generalised advantage estimation over response tokens (Schulman et al., 2016, eq. 16), not whitened.

        delta_t  = r_t + gamma * V_{t+1} - V_t
        A_t      = delta_t + gamma * lam * A_{t+1}
        return_t = A_t + V_t

    with V, the value of the state before a token, and A zero after the last one; all factors in [0, 1].

    With `lam_critic` the A in the returns has a lambda of its own (decoupled GAE; VC-PPO, Yuan et al., 2025): 1 lets
    the critic learn Monte-Carlo returns, which carry a reward at the end back undiminished. Default: lam.

    With `adaptive_lam_alpha` the lambda of the advantages grows with the l tokens of each response instead
    (length-adaptive GAE; VAPO, Yue et al., 2025); it is 0 where a response is too short:

        lam = max(0, 1 - 1 / (alpha * l))
    """
    lam_critic = lam if lam_critic is None else lam_critic
    check(rewards_BT, mask_BT, gamma, lam, lam_critic)
    if values_BT.shape != mask_BT.shape:
        raise ValueError(f"values must have the shape of the rewards, {mask_BT.shape}, got {values_BT.shape}")
    # The masked tokens of each row, side by side at its beginning; zeros after them.
    lengths_B = mask_BT.sum(axis=1)
    dense_BT = np.arange(mask_BT.shape[1]) < lengths_B[:, None]
    deltas_BT, dense_values_BT = np.zeros(mask_BT.shape), np.zeros(mask_BT.shape)
    deltas_BT[dense_BT], dense_values_BT[dense_BT] = rewards_BT[mask_BT], values_BT[mask_BT]
    deltas_BT[:, :-1] += gamma * dense_values_BT[:, 1:]
    deltas_BT -= dense_values_BT

    def summed(lam: float | Float64s) -> Float64s:
        advantages_BT = np.zeros(mask_BT.shape)
        advantages_BT[mask_BT] = _backwards(deltas_BT, gamma * lam)[dense_BT]
        return advantages_BT

    if adaptive_lam_alpha is None:
        advantages_BT = summed(lam)
        towards_returns_BT = advantages_BT if lam_critic == lam else summed(lam_critic)
    else:
        advantages_BT = summed(np.maximum(0.0, 1.0 - 1.0 / (adaptive_lam_alpha * np.maximum(lengths_B, 1))))
        towards_returns_BT = summed(lam_critic)
    return float32(advantages_BT, mask_BT), float32(towards_returns_BT + values_BT, mask_BT)


def reinforce_plus_plus(rewards_BT: Float32s, mask_BT: Mask, *, gamma: float) -> AdvantagesAndReturns:
    """REINFORCE++ (Hu, 2025): the discounted reward-to-go, GAE without values, not whitened.

    A_t = r_t + gamma * A_{t+1}
    """
    return gae(rewards_BT, np.zeros_like(rewards_BT), mask_BT, gamma=gamma, lam=1.0)


def remax(rewards_BT: Float32s, mask_BT: Mask, *, greedy_scores_B: Float32s) -> AdvantagesAndReturns:
    """ReMax (Li et al., 2024): the reward-to-go less the score of a greedy response to the same prompt.

    return_t = r_t + return_{t+1}
    A_t      = return_t - greedy score
    """
    if greedy_scores_B.shape != mask_BT.shape[:1]:
        raise ValueError(f"greedy scores must have shape {mask_BT.shape[:1]}, got {greedy_scores_B.shape}")
    to_go_BT, _ = gae(rewards_BT, np.zeros_like(rewards_BT), mask_BT, gamma=1.0, lam=1.0)
    return float32(to_go_BT - greedy_scores_B[:, None].astype(np.float64), mask_BT), to_go_BT


def _backwards(deltas_BT: Float64s, decay: float | Float64s) -> Float64s:
    """[B, T], A_t = delta_t + decay * A_{t+1}; decay may be one per row."""
    # One column after the other, from the last: each one is contiguous in this layout.
    sums_TB = deltas_BT.T.copy()
    for t in reversed(range(len(sums_TB) - 1)):
        sums_TB[t] += decay * sums_TB[t + 1]
    return np.asarray(sums_TB.T)
