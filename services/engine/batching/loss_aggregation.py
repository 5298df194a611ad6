"""Computes the weight of each token in the loss from totals of the whole mini-batch (pure functions).

With such weights a loss is sum(weight * token loss), and its value and gradient do not depend on how the mini-batch is
split over ranks and micro-batches.
"""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from splitppo.batch import Batch, Column
from splitppo.config.sections.models import LossAggMode


def response_mask(batch: Batch) -> Column:
    """Returns a batch's response mask, float32 0 or 1 per response token: its `response_mask`, or all 1 without it."""
    responses = batch["responses"]
    counts = batch["response_mask"].values != 0 if "response_mask" in batch else np.ones(len(responses.values))
    return Column(counts.astype(np.float32), responses.lengths)


def masked_lengths(mask: Column) -> NDArray[np.float64]:
    """Counts the tokens of each row that a response mask keeps, float64 [num_rows]."""
    row_of_token = np.repeat(np.arange(mask.num_rows), mask.lengths)
    return np.bincount(row_of_token, weights=mask.values, minlength=mask.num_rows).astype(np.float64)


def row_weights(
    mode: LossAggMode,
    tokens: NDArray[np.float64],
    total_tokens: float,
    total_sequences: float,
    scale: int,
) -> NDArray[np.float32]:
    """Computes for each row the loss weight of each of its tokens inside the response mask, float32 [num_rows].

        token-mean               1 / total_tokens                              mean over tokens
        token-sum                1                                             sum over tokens
        seq-mean-token-sum       1 / total_sequences                           mean over sequences of their sums
        seq-mean-token-mean      1 / (total_sequences tokens)                  mean over sequences of their means
        seq-mean-token-sum-norm  1 / (total_sequences scale)

    The last is Dr. GRPO's (Liu et al., 2025); verl up to 0.7.0 does not divide by the number of sequences.
    `tokens` [num_rows] is the number of tokens inside the mask of each row. The totals are those of the mini-batch on
    all ranks: tokens inside the mask, and sequences that have any (verl: all sequences, also fully masked ones).
    """
    sequences = max(total_sequences, 1.0)
    weights: Mapping[LossAggMode, NDArray[np.float64] | float] = {
        "token-mean": 1.0 / max(total_tokens, 1.0),
        "token-sum": 1.0,
        "seq-mean-token-sum": 1.0 / sequences,
        "seq-mean-token-mean": 1.0 / (sequences * np.maximum(tokens, 1.0)),
        "seq-mean-token-sum-norm": 1.0 / (sequences * scale),
    }
    return np.full_like(tokens, weights[mode], np.float32)
