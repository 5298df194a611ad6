"""Scores before the KL penalty and rewards after it: scaled, clipped; whitened.

B responses, N tokens of responses. float32 in and out, float64 inside.
"""

from dataclasses import dataclass

import numpy as np

from controller.ppo.masked_stats import Float32s, Floats, masked_mean, masked_whiten
from controller.ppo.normalization import Normalization
from splitppo.batch import Column
from splitppo.config.reward_shaping import RewardShapingConfig


@dataclass(frozen=True, eq=False)
class PlacedScores:
    """The parts of scores, by where they belong.

    Attributes:
        of_ends: [B], of the response as a whole.
        of_tokens: aligned with responses; None: there are none.
    """

    of_ends: Floats
    of_tokens: Column | None = None

    @classmethod
    def split(cls, scores_B: Float32s, token_scores: Column | None) -> "PlacedScores":
        """Whole scores, without the part that is placed on tokens."""
        if token_scores is None:
            return cls(scores_B)
        return cls(scores_B - token_scores.sums(), token_scores)


def shape_scores(normalization: Normalization, scores: PlacedScores) -> PlacedScores:
    """clip(score * scale / std) of every part of a score by itself; tokens without a score have none afterwards.

    std is that of the whole scores of the run's responses, this step's included (as trlX scales rewards; Engstrom et
    al., 2020, section 3); it divides nothing where there is none, or all scores were equal.
    """
    config = normalization.shaping
    factor = config.scale / (normalization.running.scores.std or 1.0)
    if factor == 1.0 and config.clip_range is None:
        return scores
    low, high = config.clip_range or (-np.inf, np.inf)

    def shape(values: Floats) -> Float32s:
        return np.clip(values * np.float64(factor), low, high).astype(np.float32)

    if (tokens := scores.of_tokens) is None:
        return PlacedScores(shape(scores.of_ends))
    of_tokens = np.where(tokens.values == 0.0, np.float32(0.0), shape(tokens.values))
    return PlacedScores(shape(scores.of_ends), Column(of_tokens, tokens.lengths))


def whiten_rewards(config: RewardShapingConfig, rewards: Column, mask: Column) -> Column:
    """(r - mean) / sqrt(var + 1e-8) + mean over the mask, zero outside it (TRL's whiten_rewards), if asked for.

    ValueError for fewer than two tokens.
    """
    if not config.whiten_rewards:
        return rewards
    rewards_N, mask_N = rewards.values, mask.values
    mean = float(masked_mean(rewards_N, mask_N))
    whitened_N = np.where(mask_N, masked_whiten(rewards_N, mask_N) + mean, 0.0)
    return Column(whitened_N.astype(np.float32), rewards.lengths)
