"""GAE with several rates: of critic and policy, by the length of a response, and from one turn to the next."""

import numpy as np

from controller.ppo.advantages.arrays import AdvantagesAndReturns, Integers, Rate, at_turn_ends, float32
from controller.ppo.advantages.gae import discounted_deltas, gae
from controller.ppo.masked_stats import Float32s, Float64s, Mask


def configured_gae(
    rewards_BT: Float32s,
    values_BT: Float32s,
    mask_BT: Mask,
    turns_BT: Integers,
    *,
    gamma: float,
    lam: float,
    lam_critic: float | None = None,
    adaptive_lam_alpha: float | None = None,
    turn_gamma: float | None = None,
    turn_lam: float | None = None,
) -> AdvantagesAndReturns:
    """Estimates advantages and returns by GAE: textbook GAE, unless one of the optional keys sets another rate.

    With `turn_gamma` and `turn_lam`, GAE has two rates:

        delta_t = r_t + g_t * V_{t+1} - V_t
        A_t     = delta_t + g_t * l_t * A_{t+1}

    (g, l) are these two from the last token of a turn to the first one of the next turn, else `gamma` and `lam`. With
    `lam_critic`, the returns have a lambda of their own, the same inside of turns and between them (`decoupled_gae`).
    With `adaptive_lam_alpha`, the policy's lambda inside of turns is `length_adaptive_lambda` instead of `lam`.
    """
    gammas = at_turn_ends(mask_BT, turns_BT, gamma, turn_gamma)
    lams = at_turn_ends(mask_BT, turns_BT, lam, turn_lam)
    if adaptive_lam_alpha is None and lam_critic is None:
        return gae(rewards_BT, values_BT, mask_BT, gamma=gammas, lam=lams)
    critic_lams = lams if lam_critic is None else lam_critic
    if adaptive_lam_alpha is not None:
        by_length_B1 = length_adaptive_lambda(mask_BT, alpha=adaptive_lam_alpha)[:, None]
        lams = at_turn_ends(mask_BT, turns_BT, by_length_B1, turn_lam)
    return decoupled_gae(rewards_BT, values_BT, mask_BT, gamma=gammas, lam=lams, lam_critic=critic_lams)


def decoupled_gae(
    rewards_BT: Float32s,
    values_BT: Float32s,
    mask_BT: Mask,
    *,
    gamma: Rate,
    lam: Rate,
    lam_critic: Rate,
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
