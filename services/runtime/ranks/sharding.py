"""Divides the rows of a batch among ranks, and puts the results of the ranks back into the order of the batch."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from services.runtime.command import Shard
from splitppo.batch import Batch, concatenate

Indices = NDArray[np.int64]


def shard_evenly(batch: Batch, num_ranks: int) -> list[Indices]:
    """Divides the rows of a batch among ranks, equally many to each; returns the row indices of each rank."""
    return np.array_split(np.arange(batch.num_rows), num_ranks)


def shard_rows(batch: Batch, num_ranks: int, shard: Shard | None) -> Sequence[Indices]:
    """Divides rows among ranks by `shard` (None: `shard_evenly`); RuntimeError unless each row has one rank."""
    num_rows = batch.num_rows
    if num_ranks == 1:
        return [np.arange(num_rows)]
    shards = (shard or shard_evenly)(batch, num_ranks)
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
