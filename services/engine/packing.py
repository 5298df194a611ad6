"""Micro-batches: which rows run together, and the tensors they become (pure; knows no model and no rank).

Legend: B rows, S positions (prompt + response), N response tokens of the micro-batch, all rows back to back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from splitppo.balance import attention_cost, partition
from splitppo.batch import RESPONSE_ALIGNED, Batch, Column

Rows = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """Rows that go through the model together, on the model's device.

    Attributes:
        input_ids: int64, prompts and responses; padded [B, S] (right-padded with 0) or packed [1, S].
        position_ids: int64, shape of input_ids; starts at 0 in every row.
        cu_seq_lens: packed: [B + 1] int32, where each row starts; None: padded.
        max_length: tokens of the longest row.
        previous: [N] int64, index into the flattened positions of the token *before* each response token: its hidden
            state predicts the token and is the state whose value counts.
        targets: [N] int64, the response tokens.
        row_index: [N] int64, the row of each response token, 0 .. B - 1.
        num_rows: B.
        mask: [N] bool, response tokens that count.
        weights: [N] float32, what each token's loss is multiplied by; 0 outside the mask.
        data: every other response-aligned column of the batch, [N] float32.
    """

    input_ids: Tensor
    position_ids: Tensor
    cu_seq_lens: Tensor | None
    max_length: int
    previous: Tensor
    targets: Tensor
    row_index: Tensor
    num_rows: int
    mask: Tensor
    weights: Tensor
    data: Mapping[str, Tensor]


def row_lengths(batch: Batch) -> NDArray[np.int32]:
    """[num_rows] tokens per row, prompt and response."""
    lengths: NDArray[np.int32] = batch["prompts"].lengths + batch["responses"].lengths
    return lengths


def num_micro_batches(lengths: NDArray[np.int32], *, max_rows: int | None, max_tokens: int, packed: bool) -> int:
    """How many micro-batches the rows need, at least 1.

    Args:
        lengths: [num_rows] tokens per row.
        max_rows: rows per micro-batch; None: dynamic, by `max_tokens`.
        max_tokens: budget of a dynamic micro-batch, padding included where there is padding.
        packed: no padding.
    """
    return max(1, len(plan(lengths, max_rows=max_rows, max_tokens=max_tokens, packed=packed)))


def plan(
    lengths: NDArray[np.int32], *, max_rows: int | None, max_tokens: int, packed: bool, at_least: int = 0
) -> list[Rows]:
    """Splits rows into micro-batches.

    Args:
        lengths, max_rows, max_tokens, packed: as in `num_micro_batches`.
        at_least: the number to make, where it is more than the rows need; the last ones may then be empty.

    Returns:
        index arrays that together hold every row once; a row longer than the budget has a micro-batch of its own.
    """
    raise NotImplementedError


def collate(
    batch: Batch, weights: Column | None, *, packed: bool, device: torch.device | str = "cpu"
) -> MicroBatch:
    """Makes the tensors of a micro-batch; no rows give a dummy of one masked response token with weight 0.

    Args:
        batch: prompts (none empty), responses, and any response-aligned columns.
        weights: aligned with the responses; None: all 1 inside the mask.
    """
    raise NotImplementedError
