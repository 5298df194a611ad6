"""An advantage estimator that trains each context as a sample of its own, as others train such episodes.

For comparison with GAE over whole episodes, in `benchmarks.curves`. It fits episodes in which each turn has a context
of its own.
"""

import numpy as np

from controller.ppo.advantages.arrays import AdvantagesAndReturns, Integers
from controller.ppo.advantages.decoupled_gae import configured_gae
from controller.ppo.masked_stats import Float32s, Mask, masked_whiten


def reward_per_segment(
    rewards_BT: Float32s, values_BT: Float32s, mask_BT: Mask, turns_BT: Integers, gamma: float, lam: float
) -> AdvantagesAndReturns:
    """Estimates advantages by GAE within each turn, at whose end stands the reward of the episode, and V is 0 after it.

    Advantages are whitened over the batch, as those of `gae` are.
    """
    following_BT = np.pad(turns_BT[:, 1:], ((0, 0), (0, 1)))
    ends_BT = mask_BT & (turns_BT != following_BT)
    shared_BT = np.where(ends_BT, rewards_BT.sum(axis=1, keepdims=True), 0.0).astype(np.float32)
    advantages_BT, returns_BT = configured_gae(
        shared_BT, values_BT, mask_BT, turns_BT, gamma=gamma, lam=lam, turn_gamma=0.0
    )
    return masked_whiten(advantages_BT, mask_BT), returns_BT
