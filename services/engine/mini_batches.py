"""Optimizer steps of one update: which rows each consists of, on this rank, and what each token's loss weighs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from services.engine.aggregation import LossAggMode, masked_lengths, response_mask, row_weights, spread
from services.engine.packing import MicroBatchLimits, Rows, plan, row_lengths
from services.engine.parallel import reduce_array
from splitppo.batch import Batch, Column


@dataclass(frozen=True, eq=False)
class MiniBatch:
    """One optimizer step.

    Attributes:
        micro_batches: rows of this rank that have counting tokens; equally many micro-batches on every rank, the last
            ones may be empty.
        weights: aligned with the responses of the whole batch.
        num_tokens: counting tokens on all ranks, the same number on each of them.
    """

    micro_batches: list[Rows]
    weights: Column
    num_tokens: int


def plan_mini_batches(
    batch: Batch,
    *,
    ppo_epochs: int,
    limits: MicroBatchLimits,
    mode: LossAggMode,
    max_response_length: int,
    device: torch.device,
) -> list[MiniBatch]:
    """All optimizer steps of an update, epoch by epoch; all ranks must call it.

    Args:
        batch: this rank's rows; `mini_batches` holds ppo_epochs entries per row, absent: one mini-batch per epoch.
        ppo_epochs: passes over the rows.
        limits: of micro-batches.
        mode: see `aggregation.row_weights`.
        max_response_length: see there.
        device: of collectives.
    """
    assigned = np.zeros((batch.num_rows, ppo_epochs), np.int64)
    if "mini_batches" in batch:
        assigned = batch["mini_batches"].values.astype(np.int64).reshape(batch.num_rows, ppo_epochs)
    num_mini_batches = int(reduce_array([assigned.max(initial=0) + 1], device, dist.ReduceOp.MAX)[0])
    mask = response_mask(batch)
    tokens = masked_lengths(mask)
    lengths = row_lengths(batch)

    rows_of = [
        [np.flatnonzero((assigned[:, epoch] == index) & (tokens > 0)) for index in range(num_mini_batches)]
        for epoch in range(ppo_epochs)
    ]
    plans = [[plan(lengths[rows], limits) for rows in epoch] for epoch in rows_of]
    totals = reduce_array(
        [[[tokens[rows].sum(), (tokens[rows] > 0).sum()] for rows in epoch] for epoch in rows_of], device
    )
    counts = reduce_array([[len(parts) for parts in epoch] for epoch in plans], device, dist.ReduceOp.MAX)
    steps = []
    for epoch in range(ppo_epochs):
        of_row = totals[epoch][assigned[:, epoch]]
        weights = row_weights(
            mode,
            tokens,
            total_tokens=of_row[:, 0],
            total_sequences=of_row[:, 1],
            max_response_length=max_response_length,
        )
        token_weights = spread(weights, mask)
        for index, (rows, parts) in enumerate(zip(rows_of[epoch], plans[epoch], strict=True)):
            count = int(counts[epoch][index])
            enough = parts if len(parts) == count else plan(lengths[rows], limits, at_least=count)
            steps.append(MiniBatch([rows[part] for part in enough], token_weights, int(totals[epoch][index][0])))
    return steps
