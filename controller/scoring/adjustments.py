"""Adjusts the scores of responses: marks truncated ones, penalizes overlong ones, and adds the reward model's scores.

Pure functions on arrays; float32 in and out, float64 inside.
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
    """Marks truncated responses in `Scores`: responses of maximum length that end with neither EOS nor a stop text.

    Conversations that did not fit are marked already.
    """
    is_cut_B = (lengths_B >= max_response_length) & ~(scores.has_eos | scores.has_stopped)
    return replace(scores, is_truncated=scores.is_truncated | is_cut_B)


def overlong_penalties(buffer: OverlongBuffer, lengths_B: Lengths, max_response_length: int) -> Float64s:
    """Computes the penalty of each response for being overlong, [B] float64, from -penalty_factor to 0.

    The penalty falls linearly from 0 at `buffer.len` tokens before the limit to -penalty_factor at the limit.

        penalty = min(0, -penalty_factor * (length - (max_response_length - len)) / len)
    """
    assert buffer.len is not None, "the configuration refuses an enabled buffer without a length"
    num_exceeding_B = np.maximum(lengths_B - (max_response_length - buffer.len), 0)
    return np.asarray(-buffer.penalty_factor * num_exceeding_B / buffer.len)


def subtract_overlong(scores: Scores, buffer: OverlongBuffer, lengths_B: Lengths, max_response_length: int) -> Scores:
    """Lowers the scores of overlong responses by their penalties.

    With `buffer.log` the fields `overlong_reward` and `overlong` are added to the scorer's fields, too.
    """
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
    """Combines the reward functions' scores with those of the reward model, [B] float32, into one score per response.

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
    """Removes the reward model's part from scores and token scores; without a reward function, a score is then 0."""
    rule_scores_B = np.where(np.isnan(scores.rule_scores), np.float32(0.0), scores.rule_scores)
    return replace(scores, scores=rule_scores_B, token_scores=scores.rule_token_scores)


def without_scores(scores: Scores) -> Scores:
    """Replaces all scores by 0, of responses and of their tokens; what else is known of the responses stays."""
    nothing = replace(scores.token_scores, values=np.zeros_like(scores.token_scores.values))
    return replace(scores, scores=np.zeros_like(scores.scores), token_scores=nothing)
