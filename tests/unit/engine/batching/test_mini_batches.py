"""The mini-batch of each row."""

from __future__ import annotations

import numpy as np
import pytest

from services.engine.batching.mini_batches import assign_mini_batches


def assign(num_rows: int, width: int | None, epochs: int, *, shuffle: bool = False, step: int = 1) -> np.ndarray:
    column = assign_mini_batches(num_rows, width, epochs, shuffle=shuffle, seed=7, step=step)
    assert column.lengths.tolist() == [epochs] * num_rows
    return column.values.reshape(num_rows, epochs)


def test_without_shuffling_mini_batches_are_consecutive_rows_in_every_epoch() -> None:
    assert assign(6, 2, 2).tolist() == [[0, 0], [0, 0], [1, 1], [1, 1], [2, 2], [2, 2]]


def test_no_mini_batch_width_means_one_mini_batch() -> None:
    assert not assign(5, None, 1).any()


def test_shuffling_draws_mini_batches_of_equal_width_anew_in_each_epoch_and_step() -> None:
    first = assign(40, 10, 2, shuffle=True)

    for epoch in range(2):
        assert np.bincount(first[:, epoch]).tolist() == [10] * 4
    assert (first[:, 0] != first[:, 1]).any()
    assert (first != assign(40, 10, 2, shuffle=True, step=2)).any()
    np.testing.assert_array_equal(first, assign(40, 10, 2, shuffle=True))


@pytest.mark.parametrize(("num_rows", "width"), [(5, 2), (2, 4), (0, 2)])
def test_rows_that_do_not_divide_are_refused_with_both_numbers(num_rows: int, width: int) -> None:
    with pytest.raises(ValueError, match=f"{num_rows} rows do not divide into mini-batches of {width}"):
        assign(num_rows, width, 1)
