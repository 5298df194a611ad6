"""Plans the optimizer steps of an update: each step's rows on this rank, and the loss weight of each token.

Rows have one context each: they may be segments of whole rows (segments.py), of which mini-batches and weights are
made. The weights are the `row_weights` of totals over all ranks. `collate` gives each token the weight of its row, or
0 if the token does not count.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from services.engine.batching.loss_aggregation import masked_lengths, response_mask, row_weights
from services.engine.batching.packing import MicroBatchLimits, Rows, plan_micro_batches, row_lengths
from services.engine.batching.segments import whole_rows
from services.engine.batching.shared_images import together_for_images
from services.engine.parallel import reduce_array
from splitppo.batch import Batch, Column
from splitppo.config.sections.models import TrainedModelConfig


@dataclass(frozen=True, eq=False)
class MiniBatch:
    """The rows of one optimizer step on one rank, in equally many micro-batches per rank, without fully masked rows."""

    micro_batches: list[Rows]  # the last ones may be empty
    weights: NDArray[np.float32]  # [num_rows of the rank's batch], the weight of each counting token of a row
    num_tokens: int  # counting tokens on all ranks
    epoch: int = 0  # from 0


def assign_mini_batches(
    num_rows: int, mini_batch_rows: int | None, num_epochs: int, *, shuffle: bool, seed: int, step: int
) -> Column:
    """Makes the column `mini_batches`: for each row and PPO epoch, the index of the row's mini-batch.

    Called before rows are divided among ranks. A mini-batch has `mini_batch_rows` rows (None: all). They are
    consecutive; with `shuffle` they are chosen at random, seeded by (seed, step, epoch).

    Raises:
        ValueError: the number of rows is 0, or no multiple of `mini_batch_rows`.
    """
    width = mini_batch_rows or max(num_rows, 1)
    if num_rows == 0 or num_rows % width:
        raise ValueError(
            f"{num_rows} rows do not divide into mini-batches of {width} (ppo_mini_batch_size x rollout.n)"
        )
    indices = np.empty((num_rows, num_epochs), np.int32)
    for epoch in range(num_epochs):
        rows = np.random.default_rng([seed, step, epoch]).permutation(num_rows) if shuffle else np.arange(num_rows)
        indices[rows, epoch] = np.arange(num_rows) // width
    return Column(indices.reshape(-1), np.full(num_rows, num_epochs, np.int32))


def plan_mini_batches(
    batch: Batch,
    config: TrainedModelConfig,
    limits: MicroBatchLimits,
    max_response_length: int,
    device: torch.device,
    *,
    keeps_rows: bool = False,
) -> list[MiniBatch]:
    """Plans all optimizer steps of an update with this rank's rows, epoch by epoch; all ranks must call it.

    The column `mini_batches` has an entry per row and epoch; without it there are ppo_epochs of one mini-batch each.
    With `keeps_rows` the segments of a row share a micro-batch; without it each has its place alone. Rows with images
    have one segment.
    """
    assigned = np.zeros((batch.num_rows, config.ppo_epochs), np.int64)
    if "mini_batches" in batch:
        column = batch["mini_batches"]
        assigned = column.values.astype(np.int64).reshape(batch.num_rows, int(column.lengths.max(initial=0)))
    plan_of_rank = [assigned.max(initial=0) + 1, assigned.shape[1]]
    num_mini_batches, num_epochs = reduce_array(plan_of_rank, device, dist.ReduceOp.MAX).astype(int)
    if not batch.num_rows:  # a rank without rows makes the optimizer steps of the others
        assigned = np.zeros((0, num_epochs), np.int64)
    row_of_segment = whole_rows(batch)
    own_tokens = masked_lengths(response_mask(batch))
    tokens_of_rows = np.bincount(row_of_segment, weights=own_tokens).astype(np.float64)
    tokens = tokens_of_rows[row_of_segment]  # for each segment those of its whole row
    is_computed = (tokens > 0) & (batch["responses"].lengths > 0)
    rows_of_steps = [
        np.flatnonzero((epoch == index) & is_computed) for epoch in assigned.T for index in range(int(num_mini_batches))
    ]
    own_totals = [[own_tokens[rows].sum(), len(np.unique(row_of_segment[rows]))] for rows in rows_of_steps]
    totals = reduce_array(own_totals, device)
    totals /= config.ulysses_sequence_parallel_size  # so many ranks have the same rows
    lengths = row_lengths(batch)
    together = together_for_images(batch, lengths, limits)
    if keeps_rows and together is None:
        together = row_of_segment
    micro_batches = agree_on_micro_batches(rows_of_steps, lengths, limits, device, together=together)
    scale = config.loss_scale_factor or max_response_length
    mini_batches = []
    for step, (parts, (num_tokens, num_rows)) in enumerate(zip(micro_batches, totals, strict=True)):
        weights = row_weights(config.loss_agg_mode, tokens, num_tokens, num_rows, scale)
        mini_batches.append(MiniBatch(parts, weights, int(num_tokens), epoch=step // int(num_mini_batches)))
    return mini_batches


def agree_on_micro_batches(
    sets: Sequence[Rows],
    lengths: NDArray[np.int32],
    limits: MicroBatchLimits,
    device: torch.device,
    *,
    together: Rows | None = None,
) -> list[list[Rows]]:
    """Divides each set of rows into equally many micro-batches on all ranks, which all call it with equally many sets.

    `lengths` are the token counts of all rows of this rank; a set contains row indices. Rows of a set with the same
    number in `together` share a micro-batch.
    """

    def plan(rows: Rows, at_least: int) -> list[Rows]:
        of_set = None if together is None else together[rows]
        return plan_micro_batches(lengths[rows], limits, together=of_set, at_least=at_least)

    plans = [plan(rows, 1) for rows in sets]
    counts = reduce_array([len(parts) for parts in plans], device, dist.ReduceOp.MAX).astype(int)
    agreed = []
    for rows, parts, count in zip(sets, plans, counts, strict=True):
        as_many = parts if len(parts) == count else plan(rows, int(count))
        agreed.append([rows[part] for part in as_many])
    return agreed
