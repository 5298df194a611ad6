"""How token losses become one number: a weight per token, from totals of the whole mini-batch (pure).

With such weights a loss is just sum(weight * token loss): its value and gradient do not depend on how the mini-batch is
split over ranks and micro-batches.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from splitppo.batch import Batch, Column

LossAggMode = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


def response_mask(batch: Batch) -> Column:
    """The column `response_mask` as float32; every response token counts where it is absent."""
    lengths = batch["responses"].lengths
    if "response_mask" not in batch:
        return Column(np.ones(len(batch["responses"].values), np.float32), lengths)
    return Column((batch["response_mask"].values != 0).astype(np.float32), lengths)


def masked_lengths(mask: Column) -> NDArray[np.float64]:
    """[num_rows] how many tokens of each row count."""
    row_of_token = np.repeat(np.arange(mask.num_rows), mask.lengths)
    return np.bincount(row_of_token, weights=mask.values, minlength=mask.num_rows).astype(np.float64)


def row_weights(
    mode: LossAggMode,
    tokens: NDArray[np.float64],
    *,
    total_tokens: NDArray[np.float64] | float,
    total_sequences: NDArray[np.float64] | float,
    max_response_length: int,
) -> NDArray[np.float32]:
    """The weight of every counting token of each row.

    Args:
        mode: token-mean: all tokens count the same. seq-mean-token-sum: mean over sequences of the sum of their tokens.
            seq-mean-token-mean: mean over sequences of their means. seq-mean-token-sum-norm: seq-mean-token-sum divided
            by max_response_length.
        tokens: [num_rows] counting tokens of each row.
        total_tokens: counting tokens of the row's whole mini-batch on all ranks; [num_rows] or one number.
        total_sequences: rows of that mini-batch that have any; as total_tokens.
        max_response_length: tokens.

    Returns:
        [num_rows] float32.
    """
    sequences = np.maximum(total_sequences, 1.0)
    match mode:
        case "token-mean":
            weights = 1.0 / np.maximum(total_tokens, 1.0)
        case "seq-mean-token-sum":
            weights = 1.0 / sequences
        case "seq-mean-token-mean":
            weights = 1.0 / (sequences * np.maximum(tokens, 1.0))
        case "seq-mean-token-sum-norm":
            weights = 1.0 / (sequences * max_response_length)
    return np.broadcast_to(weights, tokens.shape).astype(np.float32)


def spread(weights: NDArray[np.float32], mask: Column) -> Column:
    """Each row's weight on its counting tokens, 0 elsewhere."""
    return Column(np.repeat(weights, mask.lengths) * mask.values, mask.lengths)
