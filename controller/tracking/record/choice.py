"""Chooses the responses of a step whose tokens are recorded: some whole groups at random, and extreme responses.

The random ones alone represent the step. The extremes are there to be looked at; `why` says why each was chosen.
"""

from collections.abc import Iterator
from enum import IntFlag

import numpy as np
from numpy.typing import NDArray

from controller.ppo.scores import Scores
from controller.tracking.record.step_tokens import Numbers
from splitppo.config import Config

_PER_REASON = 2


class Why(IntFlag):
    """The reasons for which the tokens of a response are recorded; 0: they are not."""

    RANDOM = 1
    HIGH_SCORE = 2
    LOW_SCORE = 4
    LONGEST = 8
    KL = 16
    VALUE_ERROR = 32
    ADVANTAGE = 64
    MISMATCH = 128
    REPETITION = 256
    NO_EOS = 512
    SCORER_FAILED = 1024


def choose(numbers: Numbers, scores: Scores, config: Config, step: int) -> NDArray[np.int32]:
    """Chooses responses with at most `tokens_per_step` tokens, by seed and step alone; returns [B] int32 of `Why`.

    Half of the tokens are for the groups of a prompt, in a random order up to the first that does not fit.
    If this is the first of all, those of its responses are taken that fit. The rest is for extremes, two per reason,
    those first that are the most extreme for their reason.
    """
    lengths_B = numbers["length"].astype(np.int64)
    random = np.random.default_rng((config.run.seed, step))
    num_tokens = config.tracking.rollouts.tokens_per_step
    why_B = np.zeros(len(lengths_B), np.int32)
    taken = _random_groups(lengths_B, config.rollout.n, num_tokens // 2, random)
    why_B[taken] = Why.RANDOM
    num_left = num_tokens - int(lengths_B[taken].sum())
    ranked = [*_ranked(numbers, scores, random.permutation(len(lengths_B)))]
    for rank in range(_PER_REASON):
        for reason, rows in ranked:
            if rank >= len(rows):
                continue
            row = rows[rank]
            num_more = 0 if why_B[row] else int(lengths_B[row])
            if num_more <= num_left:
                num_left -= num_more
                why_B[row] |= reason
    return why_B


def _random_groups(
    lengths_B: NDArray[np.int64], num_samples: int, num_tokens: int, random: np.random.Generator
) -> NDArray[np.int64]:
    """Draws whole groups of `num_samples` responses with at most `num_tokens` tokens; returns their rows.

    If the first group that is drawn does not fit, those of its responses are taken that do.
    """
    num_groups = len(lengths_B) // num_samples
    groups = np.arange(len(lengths_B)).reshape(-1, num_samples)[random.permutation(num_groups)]
    fits = np.cumsum(lengths_B[groups].sum(axis=1)) <= num_tokens
    if fits.any() or not num_groups:
        return groups[fits].reshape(-1)
    first = groups[0]
    return np.asarray(first[np.cumsum(lengths_B[first]) <= num_tokens])


def _ranked(numbers: Numbers, scores: Scores, order_B: NDArray[np.int64]) -> Iterator[tuple[Why, NDArray[np.int64]]]:
    """Yields each reason with the responses for which it holds most, the most extreme first; ties in a random order."""
    scores_B = scores.scores
    keys = {
        Why.HIGH_SCORE: scores_B - scores_B.min(initial=np.inf),
        Why.LOW_SCORE: scores_B.max(initial=-np.inf) - scores_B,
        Why.LONGEST: numbers["length"],
        Why.KL: numbers.get("kl"),
        Why.VALUE_ERROR: numbers.get("value_error"),
        Why.ADVANTAGE: np.abs(numbers["advantage_sum"]),
        Why.MISMATCH: numbers.get("mismatch"),
        Why.REPETITION: numbers["repetition"],
        Why.NO_EOS: ~scores.has_eos,
        Why.SCORER_FAILED: np.array([failure is not None for failure in scores.failures]),
    }
    for reason, key_B in keys.items():
        if key_B is not None:
            shuffled = key_B.astype(np.float64)[order_B]
            rows = order_B[np.argsort(-shuffled, kind="stable")]
            yield reason, rows[np.isfinite(key_B[rows]) & (key_B[rows] > 0)][:_PER_REASON]
