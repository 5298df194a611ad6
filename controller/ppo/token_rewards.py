"""Token rewards: the scores where they belong, and the KL penalty that keeps the policy near the reference.

B sequences, T response tokens, right-padded; N of them, ragged. float32 in and out, float64 inside.
"""

import numpy as np

from controller.ppo.blocks import blocks
from controller.ppo.kl import kl_divergence
from controller.ppo.masked_stats import Float32s, Float64s, Mask, masked_mean
from controller.ppo.reward_shaping import PlacedScores
from splitppo.batch import Batch, Column
from splitppo.config import AlgorithmConfig

# Padded tokens that are worked on at a time.
_TOKENS = 1 << 19


def token_rewards(scores: PlacedScores, kept: Column) -> Column:
    """The scores on the tokens that are kept: that of a response on its last one, that of a token on itself.

    The score of a token that is not kept moves to the next one of its response, else to the last one before. The scores
    of a response without any have no place. `kept` is bool, of all response tokens.
    """
    offsets, rows = kept.offsets, np.flatnonzero(kept.lengths)
    places, scores_K = offsets[rows + 1] - 1, scores.of_ends[rows]
    if scores.of_tokens is not None:
        tokens = np.flatnonzero(scores.of_tokens.values)
        places = np.concatenate([places, tokens])
        scores_K = np.concatenate([scores_K, scores.of_tokens.values[tokens]])
        rows = np.concatenate([rows, np.searchsorted(offsets, tokens, side="right") - 1])
    rewards, kept_at = np.zeros(len(kept.values), np.float32), np.flatnonzero(kept.values)
    if len(kept_at):
        index = np.searchsorted(kept_at, places)
        following, previous = kept_at[np.minimum(index, len(kept_at) - 1)], kept_at[np.maximum(index - 1, 0)]
        moved = np.where((following >= places) & (following < offsets[rows + 1]), following, previous)
        is_inside = (offsets[rows] <= moved) & (moved < offsets[rows + 1])
        np.add.at(rewards, moved[is_inside], scores_K[is_inside])
    return Column(rewards, kept.lengths)


def penalise_kl(rewards_BT: Float32s, kl_BT: Float64s, mask_BT: Mask, *, kl_coef: float) -> tuple[Float32s, Float64s]:
    """r_t - kl_coef * KL_t on every token inside the mask.

    Returns:
        (rewards [B, T], KL [B]: each row's mean over its tokens; that of an empty row is 0).
    """
    kl_B = masked_mean(kl_BT, mask_BT, axis=1)
    return np.where(mask_BT, rewards_BT - kl_coef * kl_BT, 0.0).astype(np.float32), kl_B


def subtract_kl(algorithm: AlgorithmConfig, rollouts: Batch, rewards: Column, mask: Column) -> float:
    """Takes the KL penalty from the rewards, in place; returns the mean KL of the responses, in nats."""
    kl_B = np.zeros(rollouts.num_rows)
    for start, stop in blocks(mask.lengths, _TOKENS):
        columns = (rollouts["old_log_probs"], rollouts["ref_log_probs"], mask, rewards)
        log_probs_BT, ref_log_probs_BT, mask_BT, rewards_BT = (one.between(start, stop).pad() for one in columns)
        kl_BT = kl_divergence(log_probs_BT, ref_log_probs_BT, mask_BT, kl_penalty=algorithm.kl_penalty)
        rewards_BT, kl_B[start:stop] = penalise_kl(rewards_BT, kl_BT, mask_BT, kl_coef=algorithm.kl_coef)
        part = rewards.between(start, stop)
        part.values[:] = part.unpad(rewards_BT).values
    return float(kl_B.mean()) if len(kl_B) else 0.0
