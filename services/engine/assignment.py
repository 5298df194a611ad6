"""Which mini-batch a row belongs to in each PPO epoch; decided once for the whole batch, before rows go to ranks."""

from __future__ import annotations

import numpy as np

from splitppo.batch import Column


def assign_mini_batches(
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
