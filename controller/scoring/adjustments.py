"""Adjustments of scores, from arrays to arrays: truncation, overlong penalty, the reward model's share.

float32 in and out, float64 inside.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from controller.ppo.masked_stats import Float32s, Float64s
from controller.ppo.scores import Scores, objects
from splitppo.config import ConfigError
from splitppo.config.sections.reward import OverlongBuffer

Lengths = NDArray[np.integer[Any]]


def mark_truncated(scores: Scores, lengths_B: Lengths, max_response_length: int) -> Scores:
    """Marks the truncated responses: those of the greatest length that neither EOS nor a stop text has ended."""
    is_truncated_B = (lengths_B >= max_response_length) & ~(scores.has_eos | scores.has_stopped)
    return replace(scores, is_truncated=is_truncated_B)


def overlong_penalties(buffer: OverlongBuffer, lengths_B: Lengths, max_response_length: int) -> Float64s:
    """Returns [B]: from 0 at `buffer.len` tokens before the limit, down to -penalty_factor at the limit.

    penalty = min(0, -penalty_factor * (length - (max_response_length - len)) / len)
    """
    assert buffer.len is not None, "the configuration refuses an enabled buffer without a length"
    num_exceeding_B = np.maximum(lengths_B - (max_response_length - buffer.len), 0)
    return np.asarray(-buffer.penalty_factor * num_exceeding_B / buffer.len)


def subtract_overlong(scores: Scores, buffer: OverlongBuffer, lengths_B: Lengths, max_response_length: int) -> Scores:
    """Adds the (negative) penalties of long responses; with `buffer.log` also fields `overlong_reward`, `overlong`."""
    if not buffer.enable:
        return scores
    penalties_B = overlong_penalties(buffer, lengths_B, max_response_length)
    punished = replace(scores, scores=(scores.scores.astype(np.float64) + penalties_B).astype(np.float32))
    if not buffer.log:
        return punished
    rows = zip(scores.extra, penalties_B.tolist(), strict=True)
    extra = objects({**fields, "overlong_reward": penalty, "overlong": penalty < 0.0} for fields, penalty in rows)
    return replace(punished, extra=extra)


def add_model_scores(
    scores: Scores, model_scores_B: Float32s, coef_of: Callable[[str], float], *, rule_coef: float = 1.0
) -> Scores:
    """Combines the scores of the scorers with those of the reward model.

        score = rule_coef * score of the scorers + penalties + coef(data source) * model score

    Raises:
        ConfigError: a score of the reward model is not finite.
    """
    if not np.isfinite(model_scores_B).all():
        row = int(np.argmin(np.isfinite(model_scores_B)))
        got = f"{model_scores_B[row]} for response {row}"
        raise ConfigError(f"reward_model.model: expected finite scores, got {got}")
    rule_scores_B = without_model_scores(scores).scores.astype(np.float64)
    coefs_B = np.array([coef_of(source) for source in scores.data_sources], np.float64)
    combined_B = scores.scores - (1.0 - rule_coef) * rule_scores_B + coefs_B * model_scores_B
    placed = scores.rule_token_scores
    return replace(
        scores,
        scores=combined_B.astype(np.float32),
        model_scores=model_scores_B,
        token_scores=replace(placed, values=placed.values * np.float32(rule_coef)),
    )


def without_model_scores(scores: Scores) -> Scores:
    """Returns the scorers' part of the scores and of the token scores; 0 for a data source without a scorer."""
    rule_scores_B = np.where(np.isnan(scores.rule_scores), np.float32(0.0), scores.rule_scores)
    return replace(scores, scores=rule_scores_B, token_scores=scores.rule_token_scores)
