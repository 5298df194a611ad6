"""The order of an epoch: shares of files, and no prompt twice before each came once."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from controller.data.epoch_order import epoch_order, mixed_order, quotas

SIZES = (4, 10)  # places 0 to 3 and 4 to 13


@pytest.mark.parametrize(
    ("weights", "expected"),
    [((1, 1), [5, 5]), ((0.7, 0.3), [7, 3]), ((2, 1), [7, 3]), ((1, 1, 1), [4, 3, 3]), ((1, 1000), [0, 10])],
)
def test_shares_are_rounded_to_an_exact_sum(weights: tuple[float, ...], expected: list[int]) -> None:
    assert quotas(weights, 10) == expected


@pytest.mark.promise("prompts")
@pytest.mark.parametrize("shuffle", [True, False])
def test_every_epoch_has_the_files_shares_and_files_go_through_their_prompts_in_turn(shuffle: bool) -> None:
    epochs = [mixed_order(SIZES, (7, 7), 1, epoch, shuffle=shuffle) for epoch in range(20)]
    for order in epochs:
        assert (order < SIZES[0]).sum() == 7
        assert len(order) == 14
    for file, places in ((0, range(4)), (1, range(4, 14))):
        seen: Counter[int] = Counter(dict.fromkeys(places, 0))
        for order in epochs:
            seen.update(place for place in order.tolist() if place in places)
            assert max(seen.values()) - min(seen.values()) <= 1, (file, seen)


def test_epochs_differ_where_they_are_shuffled_and_a_seed_gives_the_same_again() -> None:
    first, second = (mixed_order(SIZES, (7, 7), 1, epoch, shuffle=True).tolist() for epoch in (0, 1))
    assert first != second
    mixed_order.cache_clear()
    assert mixed_order(SIZES, (7, 7), 1, 0, shuffle=True).tolist() == first
    assert mixed_order(SIZES, (7, 7), 2, 0, shuffle=True).tolist() != first


def test_unshuffled_files_take_turns_evenly_in_their_own_order() -> None:
    order = mixed_order(SIZES, (2, 6), 1, 0, shuffle=False).tolist()
    # Every second of file 0, every sixth of file 1; where both are due, file 0 comes first.
    assert order == [4, 0, 5, 6, 7, 1, 8, 9]


def test_without_weights_every_prompt_comes_once() -> None:
    assert sorted(epoch_order(9, 3, 5, shuffle=True)) == list(range(9))
    assert np.array_equal(epoch_order(9, 3, 5, shuffle=False), np.arange(9))
