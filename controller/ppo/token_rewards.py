"""Token rewards: the score of each response, and the KL penalty that keeps the policy near the reference.

B sequences, T response tokens, right-padded. float32 in and out, float64 inside.
"""

import numpy as np

from controller.ppo.masked_stats import Float32s, Float64s, Floats, Mask, masked_mean


def token_rewards(scores_B: Floats, mask_BT: Mask) -> Float32s:
    """r_t = score where t is the response's last token inside the mask, else 0; [B, T].

    The score of a response without any token has no place.
    """
    rewards_BT = np.zeros(mask_BT.shape, np.float32)
    rows = np.flatnonzero(mask_BT.any(axis=1))
    if len(rows):
        last_B = mask_BT.shape[1] - 1 - np.argmax(mask_BT[rows, ::-1], axis=1)
        rewards_BT[rows, last_B] = scores_B[rows]
    return rewards_BT


def penalise_kl(rewards_BT: Float32s, kl_BT: Float64s, mask_BT: Mask, *, kl_coef: float) -> tuple[Float32s, Float64s]:
    """r_t - kl_coef * KL_t on every token inside the mask.

    Returns:
        (rewards [B, T], KL [B]: each row's mean over its tokens; that of an empty row is 0).
    """
    kl_B = masked_mean(kl_BT, mask_BT, axis=1)
    return np.where(mask_BT, rewards_BT - kl_coef * kl_BT, 0.0).astype(np.float32), kl_B
