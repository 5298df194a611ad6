"""Divides the rows of a batch among ranks, and puts the results of the ranks back into the order of the batch."""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from splitppo.balance import attention_cost, partition
from splitppo.batch import Batch, concatenate

Indices = NDArray[np.int64]
Shard = Callable[[Batch, int], Sequence[Indices]]


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


def shard_rows(batch: Batch, num_ranks: int, shard: Shard | None) -> Sequence[Indices]:
    """Divides rows among ranks by `shard` (None: nearly equal cost); RuntimeError unless each row has one rank."""
    num_rows = batch.num_rows
    if num_ranks == 1:
        return [np.arange(num_rows)]
    shards = (shard or shard_by_tokens)(batch, num_ranks)
    if len(shards) != num_ranks or not np.array_equal(np.sort(np.concatenate(shards)), np.arange(num_rows)):
        raise RuntimeError(f"shard must place {num_rows} rows once on {num_ranks} ranks, got {list(map(len, shards))}")
    return shards


def join_shards(shards: Sequence[Indices], parts: Sequence[Batch | None]) -> Batch | None:
    """Joins the results of the ranks in the order of the rows before sharding; None if no rank has result columns.

    Args:
        shards: the row indices of each rank.
        parts: the result of each rank: k rows per row, grouped by row, the same k on every rank; None: no columns.
    """
    worked = [(rows, part) for rows, part in zip(shards, parts, strict=True) if len(rows)]
    if all(part is None for _, part in worked):
        return None
    factors = {-1 if part is None else part.num_rows / len(rows) for rows, part in worked}
    factor = factors.pop()
    if factors or factor < 1 or factor != int(factor):
        made = ", ".join(f"{len(rows)} -> {part.num_rows if part else 'none'}" for rows, part in worked)
        raise RuntimeError(f"every rank must return the same multiple of its rows, got {made}")
    if len(worked) == 1:
        return worked[0][1]
    expanded = [(rows[:, None] * int(factor) + np.arange(int(factor))).reshape(-1) for rows, _ in worked]
    order = np.argsort(np.concatenate(expanded), kind="stable")
    return concatenate([part for _, part in worked if part is not None]).take(order)
