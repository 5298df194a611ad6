"""Divides batch rows into micro-batches and converts each into tensors (pure functions: no model, no communication).

All rows have one context here: one that has several was divided before (segments.py).

Legend: B rows, S positions (prompt + response), N response tokens of the micro-batch, all rows back to back.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed import ProcessGroup

from services.engine.batching.loss_aggregation import response_mask
from services.engine.batching.micro_batch_images import MicroBatchImages, images_of_rows, positions_in_images
from services.engine.batching.on_device import on_device
from services.engine.batching.own_positions import OwnPositions, own_positions
from services.engine.batching.padded_rows import PaddedRows
from services.engine.batching.segments import whole_rows
from splitppo.balance import attention_cost, partition
from splitppo.batch import Batch
from splitppo.columns import spec_of
from splitppo.images.settings import ImageSettings

Rows = NDArray[np.int64]

# Columns of response tokens that are no input of a loss by their name: see `mask` and `selected` of ResponseTokens.
_APART = frozenset({"response_mask", "selected_tokens"})


@dataclass(frozen=True)
class MicroBatchLimits:
    """The limits for micro-batches: packed or padded, and the largest number of tokens or rows.

    The ranks of a sequence group divide the positions of a micro-batch, which is packed. Some models rotate the
    positions of a row that is longer than `rope_switch` by other factors; such rows have micro-batches of their own,
    since transformers chooses the factors of a micro-batch by its longest row. Where attention takes no packed rows,
    they are also padded for it (`pads_attention`).
    """

    packed: bool  # rows back to back without padding; otherwise right-padded to the longest row
    max_tokens: int  # budget of a dynamic micro-batch, padding included
    max_rows: int | None = None  # of a fixed micro-batch; None: dynamic
    sequence_group: ProcessGroup | None = None  # None: this rank computes all positions
    rope_switch: int | None = None  # tokens; None: the factors are the same for all rows
    pads_attention: bool = False
    image_settings: ImageSettings | None = None  # None: the model reads text alone


@dataclass(frozen=True, eq=False)
class ResponseTokens:
    """The response tokens of a micro-batch, the input of a loss; rows are back to back and in order.

    Rows are whole, but for a loss of tokens: then the segments of a row may be in several micro-batches.
    """

    mask: Tensor  # [N] bool, tokens that count
    weights: Tensor  # [N] float32, what each token's loss is multiplied by; 0 outside the mask
    row_index: Tensor  # [N] int64, the row of each token, of those in the micro-batch that have one: less than N
    columns: Mapping[str, Tensor]  # other response-aligned columns, [N] float32; with K values per token [N, K]
    selected: Tensor | None = None  # [N] bool, tokens that the loss treats apart in this PPO epoch


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """The tensors of rows that go through the model in one forward pass, on the model's device.

    Log-probs and value of a response token are computed from the hidden state of the token *before* it. In a sequence
    group, `input_ids` and `position_ids` are those of this rank's positions, and everything else is of whole rows.
    """

    input_ids: Tensor  # int64, prompts and responses; padded [B, S] (right-padded with 0) or packed [1, S]
    position_ids: Tensor  # int64, shape of input_ids, or [3, *shape] in time, height and width; each row begins at 0
    cu_seq_lens: Tensor | None  # packed: [B + 1] int32, where each row starts; None: padded
    max_length: int  # tokens of the longest row
    previous: Tensor  # [N] int64, index into the flattened positions of the token before each response token
    targets: Tensor  # [N] int64, the response tokens
    tokens: ResponseTokens
    own: OwnPositions | None = None  # None: this rank computes all positions
    padded_rows: PaddedRows | None = None  # None: attention takes the rows as they are
    images: MicroBatchImages | None = None  # None: no row has an image


def row_lengths(batch: Batch) -> NDArray[np.int32]:
    """Counts the tokens of prompt and response of each row, int32 [num_rows]."""
    lengths: NDArray[np.int32] = batch["prompts"].lengths + batch["responses"].lengths
    return lengths


@dataclass(frozen=True, eq=False)
class _Units:
    """The units that a micro-batch takes as a whole: single rows, or rows that stay together; arrays of [num_units].

    Attributes:
        rows: the rows of each unit.
        num_rows, tokens: how many rows a unit has, and tokens in all of them.
        longest: tokens of its longest row.
        costs: what a forward pass of its rows costs, see `attention_cost`.
    """

    rows: Sequence[Rows]
    num_rows: NDArray[np.int64]
    tokens: NDArray[np.int64]
    longest: NDArray[np.int64]
    costs: NDArray[np.float64]

    @classmethod
    def of(cls, lengths: NDArray[np.int32], together: Rows) -> Self:
        """Makes units of rows with these token counts: those with the same number in `together` are one unit."""
        _, unit_of_row, num_rows = np.unique(together, return_inverse=True, return_counts=True)
        rows = np.split(np.argsort(unit_of_row, kind="stable"), np.cumsum(num_rows)[:-1]) if len(lengths) else []
        longest = np.zeros(len(rows), np.int64)
        np.maximum.at(longest, unit_of_row, lengths)
        tokens = np.zeros(len(rows), np.int64)
        np.add.at(tokens, unit_of_row, lengths)
        costs = np.bincount(unit_of_row, weights=attention_cost(lengths), minlength=len(rows)).astype(np.float64)
        return cls(rows, num_rows, tokens, longest, costs)

    def take(self, units: Rows) -> "_Units":
        """Returns some of the units, by their indices."""
        rows = [self.rows[unit] for unit in units]
        return _Units(rows, self.num_rows[units], self.tokens[units], self.longest[units], self.costs[units])


def plan_micro_batches(
    lengths: NDArray[np.int32], limits: MicroBatchLimits, *, together: Rows | None = None, at_least: int = 1
) -> list[Rows]:
    """Divides rows of the given token counts into micro-batches; returns arrays of row indices, every row once.

    Rows with the same number in `together` [num_rows] share a micro-batch, where they are neighbours (None: each row is
    alone). What is longer than the budget has a micro-batch of its own. If fewer than `at_least` are needed, exactly
    `at_least` are made; some are empty only if there are fewer rows. The ranks have agreed on that number, and would
    wait for each other if one of them made more.

    Rows on both sides of `limits.rope_switch` never share a micro-batch, because the model rotates long ones by other
    factors.
    """
    units = _Units.of(lengths, np.arange(len(lengths)) if together is None else together)
    parts = _plan_units(units, limits, at_least)
    return [np.concatenate([np.empty(0, np.int64), *(units.rows[unit] for unit in part)]) for part in parts]


def _plan_units(units: _Units, limits: MicroBatchLimits, at_least: int) -> list[Rows]:
    """Divides units into micro-batches as `plan_micro_batches` says; returns arrays of their indices."""
    is_long = units.longest > (math.inf if limits.rope_switch is None else limits.rope_switch)
    if is_long.any() and not is_long.all():
        of_one_kind = replace(limits, rope_switch=None)
        kinds = (np.flatnonzero(~is_long), np.flatnonzero(is_long))
        apart = [kind[part] for kind in kinds for part in _plan_units(units.take(kind), of_one_kind, 1)]
        return _split_up(apart, at_least)
    if limits.max_rows is None and limits.packed:
        return _plan_packed(units, limits.max_tokens, at_least)
    return _split_up(_plan_by_rows(units, limits), at_least)


def _plan_by_rows(units: _Units, limits: MicroBatchLimits) -> list[Rows]:
    """Divides units, those with the longest rows first, into parts of a limited number of rows, or one unit.

    The limit is `max_rows`, or else as many rows of the longest one's length as have `max_tokens` tokens with padding.
    """
    longest_first = np.argsort(-units.longest, kind="stable")
    rows_until = np.cumsum(units.num_rows[longest_first])
    parts: list[Rows] = []
    start = 0
    while start < len(longest_first):
        max_rows = limits.max_rows or limits.max_tokens // max(1, int(units.longest[longest_first[start]]))
        rows_before = int(rows_until[start - 1]) if start else 0
        stop = max(start + 1, int(np.searchsorted(rows_until, rows_before + max_rows, side="right")))
        parts.append(longest_first[start:stop])
        start = stop
    return parts


def _plan_packed(units: _Units, max_tokens: int, at_least: int) -> list[Rows]:
    """Divides units into at least `at_least` parts of similar cost; each has at most max_tokens tokens, or one unit."""

    def within_budget(parts: list[Rows]) -> bool:
        return all(len(part) <= 1 or units.tokens[part].sum() <= max_tokens for part in parts)

    num_parts = max(1, -(-int(units.tokens.sum()) // max_tokens))
    while not within_budget(parts := partition(units.costs, num_parts)):
        num_parts += 1
    if num_parts >= at_least:
        return parts
    # Parts are balanced by cost, the budget is in tokens: with more parts one may be over it, with fewer parts none.
    balanced = partition(units.costs, at_least)
    return balanced if within_budget(balanced) else _split_up(parts, at_least)


def _split_up(parts: list[Rows], num_parts: int) -> list[Rows]:
    """Halves the micro-batches with most rows until there are num_parts; adds empty ones if there are fewer rows."""
    parts = list(parts)
    while len(parts) < num_parts and any(len(part) > 1 for part in parts):
        largest = max(range(len(parts)), key=lambda index: len(parts[index]))
        half = len(parts[largest]) // 2
        parts[largest : largest + 1] = [parts[largest][:half], parts[largest][half:]]
    return parts + [np.empty(0, np.int64)] * (num_parts - len(parts))


def collate(
    batch: Batch,
    weights: NDArray[np.float32] | None,
    limits: MicroBatchLimits,
    *,
    device: torch.device,
    epoch: int = 0,
) -> MicroBatch:
    """Converts rows into the tensors of a micro-batch; an empty batch becomes one masked response token of weight 0.

    `weights` [num_rows] are the loss weights of each counting token of a row (None: 1); no prompt may be empty; `epoch`
    is the PPO epoch, from 0.

    In a sequence group the tensors have only this rank's positions (`own`), but lengths and starts of all.
    """
    packed = limits.packed
    if batch.num_rows == 0:
        batch = _dummy(batch)
        weights = None
    prompts = batch["prompts"]
    responses = batch["responses"]
    lengths = row_lengths(batch).astype(np.int64)
    max_length = int(lengths.max())
    cu_seq_lens = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    starts: Rows = cu_seq_lens[:-1] if packed else np.arange(batch.num_rows) * max_length
    own = None
    response_positions = _positions(starts + prompts.lengths, responses.lengths)
    if limits.sequence_group is not None:
        own, cu_seq_lens = own_positions(limits.sequence_group, cu_seq_lens, response_positions - 1)
        starts = cu_seq_lens[:-1]
        lengths = np.diff(cu_seq_lens)
        max_length = int(lengths.max())
    shape = (1, int(cu_seq_lens[-1])) if packed else (batch.num_rows, max_length)

    input_ids = np.zeros(math.prod(shape), np.int64)
    input_ids[_positions(starts[: batch.num_rows], prompts.lengths)] = prompts.values
    input_ids[response_positions] = responses.values
    position_ids = np.arange(input_ids.size) - np.repeat(starts, lengths if packed else max_length)
    images = None
    if limits.image_settings is not None:
        position_ids = positions_in_images(position_ids, starts, batch, limits.image_settings)
        images = MicroBatchImages.of(prompts.rows(), images_of_rows(batch), starts, limits.image_settings, device)
    shown = slice(None) if own is None else slice(own.first, own.stop)
    mask = response_mask(batch).values

    def tensor(array: NDArray[np.generic]) -> Tensor:
        return on_device(array, device)

    columns = {name: _of_tokens(batch, name) for name in _loss_columns(batch)}
    return MicroBatch(
        input_ids=tensor(input_ids.reshape(shape)[:, shown]),
        position_ids=tensor(position_ids.reshape(*position_ids.shape[:-1], *shape)[..., shown]),
        cu_seq_lens=tensor(cu_seq_lens.astype(np.int32)) if packed else None,
        max_length=max_length,
        previous=tensor(response_positions - 1),
        targets=tensor(responses.values.astype(np.int64)),
        tokens=ResponseTokens(
            mask=tensor(mask != 0),
            weights=tensor(mask if weights is None else np.repeat(weights, responses.lengths) * mask),
            row_index=tensor(_row_index(batch)),
            columns={name: tensor(values) for name, values in columns.items()},
            selected=tensor(_selected(batch, epoch)),
        ),
        own=own,
        padded_rows=PaddedRows.of(lengths, device) if packed and limits.pads_attention else None,
        images=images,
    )


def _row_index(batch: Batch) -> NDArray[np.int64]:
    """Numbers the rows that have response tokens; returns the number of each token's, [N]. Segments of a row share one.

    They are neighbours where a loss looks at whole rows.
    """
    lengths = batch["responses"].lengths
    has_tokens = lengths > 0
    is_other_row = np.diff(whole_rows(batch)[has_tokens], prepend=-1) != 0
    return np.repeat(np.cumsum(is_other_row) - 1, lengths[has_tokens])


def _loss_columns(batch: Batch) -> list[str]:
    """Returns the names of a batch's columns of response tokens that a loss finds in `ResponseTokens.columns`."""
    return sorted(name for name in batch.columns if spec_of(name).is_of_tokens and name not in _APART)


def _of_tokens(batch: Batch, name: str) -> NDArray[np.generic]:
    """Returns a column's values [N], or [N, K] with K values per token; ids are int64, by which torch gathers."""
    values = batch[name].values
    if spec_of(name).kind == "several_per_token":
        values = values.reshape(len(batch["responses"].values), -1)
    return values.astype(np.int64) if values.dtype == np.int32 else values


def _selected(batch: Batch, epoch: int) -> NDArray[np.bool_]:
    """Returns the mask of response tokens selected for this epoch, [N] bool; all False without `selected_tokens`."""
    num_tokens = len(batch["responses"].values)
    if "selected_tokens" not in batch or not num_tokens:
        return np.zeros(num_tokens, np.bool_)
    selected: NDArray[np.bool_] = batch["selected_tokens"].values.reshape(num_tokens, -1)[:, epoch] != 0
    return selected


def _positions(starts: Rows, lengths: NDArray[np.int32]) -> Rows:
    """Returns start, ..., start + length - 1 for each row, concatenated over the rows, [sum(lengths)] int64."""
    ends = np.cumsum(lengths, dtype=np.int64)
    positions: Rows = np.arange(ends[-1]) + np.repeat(starts - (ends - lengths), lengths)
    return positions


def _dummy(empty: Batch) -> Batch:
    """Makes a batch of one row (one prompt token, one response token) with the columns of an empty batch, all zero."""
    names = {"prompts", "responses", "response_mask", *_loss_columns(empty)}
    return Batch.from_rows(**{name: [[0]] for name in names})
