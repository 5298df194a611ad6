"""Makes a reward per response token: shaped scores on their tokens, less the KL penalty to the reference policy.

B sequences, T response tokens, right-padded; N of them, ragged. float32 in and out, float64 inside.
"""

import numpy as np

from controller.ppo.kl import kl_divergence
from controller.ppo.masked_stats import Float32s, Float64s, Floats, Mask, blocks, masked_mean, masked_whiten
from controller.ppo.scores import Scores
from splitppo.batch import Batch, Column
from splitppo.config import AlgorithmConfig
from splitppo.config.subsections.reward_shaping import RewardShapingConfig

# The number of padded tokens that are worked on at a time.
_TOKENS = 1 << 19


def shape_scores(shaping: RewardShapingConfig, scores: Floats, *, std: float) -> Floats:
    """Scales and clips scores, element by element: clip(score * scale / std).

    `std` is the deviation of all whole scores of the run, this step's included (trlX scales rewards in this way;
    Engstrom et al., 2020, section 3). A `std` of 0 means that there is none, or that all scores were equal: nothing is
    divided.
    """
    factor = shaping.scale / (std or 1.0)
    if factor == 1.0 and shaping.clip_range is None:
        return scores
    low, high = shaping.clip_range or (-np.inf, np.inf)
    return np.clip(scores * np.float64(factor), low, high).astype(np.float32)


def shaped_parts(shaping: RewardShapingConfig, scores: Scores, *, std: float) -> tuple[Floats, Column]:
    """Shapes both parts of the scores by themselves: returns (scores at the ends of responses, [B]; scores on tokens).

    A token score of 0 stays 0.
    """
    tokens = scores.token_scores.values
    shaped = np.where(tokens == 0.0, np.float32(0.0), shape_scores(shaping, tokens, std=std))
    ends_B = shape_scores(shaping, scores.scores - scores.token_scores.sums(), std=std)
    return ends_B, Column(shaped, scores.token_scores.lengths)


def token_rewards(ends_B: Floats, token_scores: Column, rewarded: Column) -> Column:
    """Places scores on response tokens and returns the rewards; only tokens marked in `rewarded` can have a score.

    The score of a response's end belongs to its last token, a token score to its token. If this token is not rewarded,
    the score moves to the next rewarded token of the response, else to the last rewarded token before. The scores of a
    response without any rewarded token are dropped. `rewarded` is bool, aligned with responses.
    """
    offsets = rewarded.offsets
    # K scores: those of the ends of responses, then those of tokens; each with its row, and its place among all tokens.
    ended = np.flatnonzero(rewarded.lengths)
    placed = np.flatnonzero(token_scores.values)
    placed_rows = np.searchsorted(token_scores.offsets, placed, side="right") - 1
    rows = np.concatenate([ended, placed_rows])
    scores_K = np.concatenate([ends_B[ended], token_scores.values[placed]])
    places = np.concatenate([offsets[ended + 1] - 1, offsets[placed_rows] + placed - token_scores.offsets[placed_rows]])
    rewards = np.zeros(len(rewarded.values), np.float32)
    rewarded_at = np.flatnonzero(rewarded.values)
    if len(rewarded_at):
        index = np.searchsorted(rewarded_at, places)  # of the first rewarded token that is not before the score's
        following = rewarded_at[np.minimum(index, len(rewarded_at) - 1)]
        previous = rewarded_at[np.maximum(index - 1, 0)]
        moved = np.where((following >= places) & (following < offsets[rows + 1]), following, previous)
        # Else the response has no rewarded token, and `moved` lies in another one.
        is_inside = (offsets[rows] <= moved) & (moved < offsets[rows + 1])
        np.add.at(rewards, moved[is_inside], scores_K[is_inside])
    return Column(rewards, rewarded.lengths)


def penalise_kl(rewards_BT: Float32s, kl_BT: Float64s, mask_BT: Mask, *, kl_coef: float) -> tuple[Float32s, Float64s]:
    """Subtracts the KL penalty, kl_coef * KL_t in nats, from the reward of every token inside the mask.

    Returns:
        (rewards [B, T], KL [B]: the mean over the tokens of each row, 0 for an empty row).
    """
    kl_B = masked_mean(kl_BT, mask_BT, axis=1)
    return np.where(mask_BT, rewards_BT - kl_coef * kl_BT, 0.0).astype(np.float32), kl_B


def subtract_kl(algorithm: AlgorithmConfig, rollouts: Batch, rewards: Column, response_mask: Column) -> float:
    """Subtracts the KL penalty from the token rewards, in place; returns the mean KL of the responses, in nats."""
    kl_B = np.zeros(rollouts.num_rows)
    for start, stop in blocks(response_mask.lengths, _TOKENS):
        columns = (rollouts["old_log_probs"], rollouts["ref_log_probs"], response_mask, rewards)
        log_probs_BT, ref_log_probs_BT, mask_BT, rewards_BT = (column.between(start, stop).pad() for column in columns)
        kl_BT = kl_divergence(log_probs_BT, ref_log_probs_BT, mask_BT, kl_penalty=algorithm.kl_penalty)
        rewards_BT, kl_B[start:stop] = penalise_kl(rewards_BT, kl_BT, mask_BT, kl_coef=algorithm.kl_coef)
        part = rewards.between(start, stop)
        part.values[:] = part.unpad(rewards_BT).values
    return float(kl_B.mean()) if len(kl_B) else 0.0


def whiten_rewards(rewards: Column, response_mask: Column) -> Column:
    """Whitens token rewards but keeps their mean: (r - mean) / sqrt(var + 1e-8) + mean over the mask, zero outside.

    The formula is that of TRL's whiten_rewards. A single reward stays as it is.
    """
    rewards_N = rewards.values
    mask_N = response_mask.values
    mean = float(masked_mean(rewards_N, mask_N))
    whitened_N = np.where(mask_N, masked_whiten(rewards_N, mask_N) + mean, 0.0)
    return Column(whitened_N.astype(np.float32), rewards.lengths)
