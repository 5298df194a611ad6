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
    """Returns a batch's column `response_mask` as float32 0 or 1; without that column every response token counts."""
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
    """Computes the loss weight that each counting token of a row has, per row, float32 [num_rows].

        token-mean               1 / total_tokens                              all tokens count the same
        token-sum                1                                             of the whole mini-batch, on all ranks
        seq-mean-token-sum       1 / total_sequences                           mean over sequences of their sums
        seq-mean-token-mean      1 / (total_sequences tokens)                  mean over sequences of their means
        seq-mean-token-sum-norm  1 / (total_sequences scale)

    The last is Dr. GRPO's (Liu et al., 2025); verl up to 0.7.0 does not divide by the number of sequences.
    `tokens` [num_rows] are the counting tokens of each row. The totals are those of the mini-batch on all ranks:
    counting tokens, and sequences that have any (verl: all sequences, also those that are masked as a whole).
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
