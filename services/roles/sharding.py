"""Divides the rows of a batch among ranks by what they cost to compute."""

import numpy as np
from numpy.typing import NDArray

from services.runtime.ranks.sharding import Indices
from splitppo.balance import attention_cost, partition
from splitppo.batch import Batch


def row_costs(batch: Batch) -> NDArray[np.float64]:
    """Estimates each row's compute cost from the tokens of its prompt and (if any) response; float64 [num_rows]."""
    lengths = np.zeros(batch.num_rows, dtype=np.int32)
    for name in ("prompts", "responses"):
        if name in batch:
            lengths += batch[name].lengths
    return attention_cost(lengths)


def shard_by_tokens(batch: Batch, num_ranks: int) -> list[Indices]:
    """Divides the rows of a batch among ranks with nearly equal compute cost; returns the row indices of each rank."""
    return partition(row_costs(batch), num_ranks)


def shard_by_mini_batch(batch: Batch, num_ranks: int) -> list[Indices]:
    """Divides an update's rows among ranks, balanced per mini-batch of epoch 1 and in total; returns row indices.

    The column `mini_batches` [num_rows x epochs] numbers the mini-batches; without it all rows are one mini-batch.
    """
    if "mini_batches" not in batch:
        return shard_by_tokens(batch, num_ranks)
    costs = row_costs(batch)
    mini_batches = batch["mini_batches"]
    first_epoch = mini_batches.values[mini_batches.offsets[:-1]]
    rows: list[list[Indices]] = [[] for _ in range(num_ranks)]
    load = np.zeros(num_ranks)
    for mini_batch in np.unique(first_epoch):
        members = np.flatnonzero(first_epoch == mini_batch)
        parts = [members[part] for part in partition(costs[members], num_ranks)]
        # The part with the highest cost goes to the rank with the lowest cost so far.
        parts.sort(key=lambda part: -float(costs[part].sum()))
        for rank, part in zip(np.argsort(load, kind="stable"), parts, strict=True):
            rows[rank].append(part)
            load[rank] += costs[part].sum()
    return [np.sort(np.concatenate(parts)) for parts in rows]
