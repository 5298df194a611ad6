"""Micro-batches: which rows run together, and the tensors they become (pure; knows no model and no rank).

Legend: B rows, S positions (prompt + response), N response tokens of the micro-batch, all rows back to back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from splitppo.balance import attention_cost, partition
from splitppo.batch import RESPONSE_ALIGNED, Batch, Column

Rows = NDArray[np.int64]


@dataclass(frozen=True)
class MicroBatchLimits:
    """How large a micro-batch may be.

    Attributes:
        packed: rows back to back without padding; otherwise right-padded to the longest row.
        max_tokens: budget of a dynamic micro-batch, padding included.
        max_rows: rows of a fixed micro-batch; None: dynamic.
    """

    packed: bool
    max_tokens: int
    max_rows: int | None = None


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
        mask: [N] bool, response tokens that count.
        weights: [N] float32, what each token's loss is multiplied by; 0 outside the mask.
        data: every other response-aligned column of the batch, [N] float32, and "row_index", [N] int64, the row of
            each response token inside the micro-batch.
    """

    input_ids: Tensor
    position_ids: Tensor
    cu_seq_lens: Tensor | None
    max_length: int
    previous: Tensor
    targets: Tensor
    mask: Tensor
    weights: Tensor
    data: Mapping[str, Tensor]


def row_lengths(batch: Batch) -> NDArray[np.int32]:
    """[num_rows] tokens per row, prompt and response."""
    lengths: NDArray[np.int32] = batch["prompts"].lengths + batch["responses"].lengths
    return lengths


def check_prompts(batch: Batch) -> None:
    """ValueError if a prompt is empty: nothing would predict the first token of its response."""
    if batch.num_rows and not batch["prompts"].lengths.all():
        raise ValueError(f"prompt of row {int(np.argmin(batch['prompts'].lengths))} is empty")


def plan(lengths: NDArray[np.int32], limits: MicroBatchLimits, *, at_least: int = 1) -> list[Rows]:
    """Splits rows into micro-batches.

    Args:
        lengths: [num_rows] tokens per row.
        limits: what one micro-batch may hold.
        at_least: number of micro-batches to make, exactly, where the rows need fewer; there are empty ones only if
            there are fewer rows than that. Ranks agree on it, and would wait for each other if one made more.

    Returns:
        index arrays that together hold every row once; a row longer than the budget has a micro-batch of its own.
    """
    if limits.max_rows is None and limits.packed:
        return _plan_packed(lengths, limits.max_tokens, at_least)
    longest_first = np.argsort(-lengths, kind="stable")
    parts: list[Rows] = []
    start = 0
    while start < len(lengths):
        num_rows = limits.max_rows or max(1, limits.max_tokens // max(1, int(lengths[longest_first[start]])))
        parts.append(longest_first[start : start + num_rows])
        start += num_rows
    return _split_up(parts, at_least)


def _plan_packed(lengths: NDArray[np.int32], max_tokens: int, at_least: int) -> list[Rows]:
    """Balanced by cost; one more part until every part is within the budget or a single row."""
    costs = attention_cost(lengths)

    def within_budget(parts: list[Rows]) -> bool:
        return all(len(part) <= 1 or lengths[part].sum() <= max_tokens for part in parts)

    num_parts = max(1, -(-int(lengths.sum(dtype=np.int64)) // max_tokens))
    while not within_budget(parts := partition(costs, num_parts)):
        num_parts += 1
    if num_parts >= at_least:
        return parts
    # Balance is by cost and the budget in tokens, so more parts may be over it where fewer are not.
    balanced = partition(costs, at_least)
    return balanced if within_budget(balanced) else _split_up(parts, at_least)


def _split_up(parts: list[Rows], num_parts: int) -> list[Rows]:
    """Halves the parts with most rows until there are num_parts; fills up with empty ones where rows are fewer."""
    parts = list(parts)
    while len(parts) < num_parts and any(len(part) > 1 for part in parts):
        largest = max(range(len(parts)), key=lambda index: len(parts[index]))
        half = len(parts[largest]) // 2
        parts[largest : largest + 1] = [parts[largest][:half], parts[largest][half:]]
    return parts + [np.empty(0, np.int64)] * (num_parts - len(parts))


def collate(batch: Batch, weights: Column | None, *, packed: bool, device: torch.device) -> MicroBatch:
    """Makes the tensors of a micro-batch; no rows give a dummy of one masked response token with weight 0.

    Args:
        batch: prompts (none empty), responses, and any response-aligned columns.
        weights: float32, aligned with the responses; None: 1 inside the mask.
        packed: see `MicroBatchLimits`.
        device: where the tensors go.
    """
    if batch.num_rows == 0:
        batch, weights = _dummy(batch), Column.from_rows([[0.0]], np.dtype(np.float32))
    prompts, responses = batch["prompts"], batch["responses"]
    lengths = row_lengths(batch).astype(np.int64)
    max_length = int(lengths.max())
    cu_seq_lens = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    starts: Rows = cu_seq_lens[:-1] if packed else np.arange(batch.num_rows) * max_length
    num_positions = int(cu_seq_lens[-1]) if packed else batch.num_rows * max_length

    response_positions = _positions(starts + prompts.lengths, responses.lengths)
    input_ids = np.zeros(num_positions, np.int64)
    input_ids[_positions(starts, prompts.lengths)] = prompts.values
    input_ids[response_positions] = responses.values
    position_ids = np.arange(num_positions) - np.repeat(starts, lengths if packed else max_length)
    row_index = np.repeat(np.arange(batch.num_rows), responses.lengths)
    mask = batch["response_mask"].values != 0 if "response_mask" in batch else np.ones(len(row_index), np.bool_)
    columns = {name: batch[name].values for name in sorted(RESPONSE_ALIGNED & batch.columns.keys() - {"response_mask"})}

    def tensor(array: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device, non_blocking=True)

    shape = (1, num_positions) if packed else (batch.num_rows, max_length)
    return MicroBatch(
        input_ids=tensor(input_ids.reshape(shape)),
        position_ids=tensor(position_ids.reshape(shape)),
        cu_seq_lens=tensor(cu_seq_lens.astype(np.int32)) if packed else None,
        max_length=max_length,
        previous=tensor(response_positions - 1),
        targets=tensor(responses.values.astype(np.int64)),
        mask=tensor(mask),
        weights=tensor(weights.values if weights else mask.astype(np.float32)),
        data={name: tensor(values) for name, values in {**columns, "row_index": row_index}.items()},
    )


def _positions(starts: Rows, lengths: NDArray[np.int32]) -> Rows:
    """[sum(lengths)] consecutive indices from each start."""
    ends = np.cumsum(lengths, dtype=np.int64)
    positions: Rows = np.arange(ends[-1]) + np.repeat(starts - (ends - lengths), lengths)
    return positions


def _dummy(empty: Batch) -> Batch:
    """One row of two tokens with the columns of an empty batch, all zero."""
    names = (RESPONSE_ALIGNED & empty.columns.keys()) | {"prompts", "responses", "response_mask"}
    return Batch.from_rows(**{name: [[0]] for name in names})
