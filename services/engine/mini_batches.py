"""Mini-batches: which rows one optimizer step uses, and how the rows of each are spread over the ranks (pure)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from splitppo.balance import attention_cost, partition
from splitppo.batch import Batch, Column


def plan_mini_batches(
    num_rows: int, mini_batch_rows: int | None, num_epochs: int, *, shuffle: bool, seed: int, step: int
) -> Column:
    """The column `mini_batches`: the index of each row's mini-batch in every epoch.

    Args:
        num_rows: rows of the whole batch, over all ranks.
        mini_batch_rows: rows of one optimizer step; None: all.
        num_epochs: passes over the batch.
        shuffle: draw the rows of the mini-batches anew in each epoch, a function of (seed, step, epoch); otherwise they
            are consecutive rows.
        seed: of the run.
        step: of the batch.

    Raises:
        ValueError: the rows do not divide into mini-batches.
    """
    size = mini_batch_rows or max(num_rows, 1)
    if num_rows == 0 or num_rows % size:
        raise ValueError(f"{num_rows} rows do not divide into mini-batches of {size} rows (ppo_mini_batch_size x n)")
    indices = np.empty((num_rows, num_epochs), np.int32)
    for epoch in range(num_epochs):
        rows = np.random.default_rng([seed, step, epoch]).permutation(num_rows) if shuffle else np.arange(num_rows)
        indices[rows, epoch] = np.arange(num_rows) // size
    return Column(indices.reshape(-1), np.full(num_rows, num_epochs, np.int32))


def shard_mini_batches(batch: Batch, num_ranks: int) -> list[NDArray[np.int64]]:
    """Spreads the rows of each mini-batch (of the first epoch) over the ranks, balanced by the cost of their tokens.

    Args:
        batch: prompts, responses, and mini_batches where rows belong to several.
        num_ranks: ranks of the group.

    Returns:
        num_ranks index arrays, ascending, that together hold every row once. The part that is heaviest within its
        mini-batch goes to the rank with least work so far, so that the ranks' totals are balanced too.
    """
    costs = attention_cost(batch["prompts"].lengths + batch["responses"].lengths)
    first_epoch = np.zeros(batch.num_rows, np.int32)
    if "mini_batches" in batch and batch.num_rows:
        first_epoch = batch["mini_batches"].values.reshape(batch.num_rows, -1)[:, 0]
    shards: list[list[NDArray[np.int64]]] = [[] for _ in range(num_ranks)]
    loads = np.zeros(num_ranks)
    for index in np.unique(first_epoch):
        rows = np.flatnonzero(first_epoch == index)
        parts = [rows[part] for part in partition(costs[rows], num_ranks)]
        parts.sort(key=lambda part: -float(costs[part].sum()))
        for rank, part in zip(np.argsort(loads, kind="stable"), parts, strict=True):
            shards[rank].append(part)
            loads[rank] += costs[part].sum()
    return [np.sort(np.concatenate([*parts, np.empty(0, np.int64)])).astype(np.int64) for parts in shards]
