"""Divides the rows of a batch among ranks by what they cost to compute."""

import numpy as np
from numpy.typing import NDArray

from services.engine.batching.shared_images import partition_rows
from services.runtime.ranks.sharding import Indices
from splitppo.balance import attention_cost
from splitppo.batch import Batch
from splitppo.segments import Segments


def row_costs(batch: Batch) -> NDArray[np.float64]:
    """Estimates each row's compute cost from the tokens of its segments, each with its context; float64 [num_rows].

    Before there are responses, these are the tokens of prompts.
    """
    if "responses" not in batch:
        return attention_cost(batch["prompts"].lengths)
    segments = Segments.of(batch)
    costs = attention_cost(segments.lengths(batch))
    return np.bincount(segments.rows, weights=costs, minlength=batch.num_rows).astype(np.float64)


def shard_by_tokens(batch: Batch, num_ranks: int) -> list[Indices]:
    """Divides the rows of a batch among ranks with nearly equal compute cost; returns the row indices of each rank."""
    return partition_rows(batch, np.arange(batch.num_rows), row_costs(batch), num_ranks)


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
        parts = partition_rows(batch, members, costs, num_ranks)
        # The part with the highest cost goes to the rank with the lowest cost so far.
        parts.sort(key=lambda part: -float(costs[part].sum()))
        for rank, part in zip(np.argsort(load, kind="stable"), parts, strict=True):
            rows[rank].append(part)
            load[rank] += costs[part].sum()
    return [np.sort(np.concatenate(parts)) for parts in rows]
