"""Rows are split over ranks and joined again."""

from __future__ import annotations

import numpy as np
import pytest

from services.runtime.ranks.row_group import to_leaders
from services.runtime.ranks.sharding import join_shards, shard_evenly, shard_rows
from splitppo.batch import Batch
from tests.support.seeds import shifted


def ragged(num_rows: int, longest: int) -> list[list[int]]:
    return [[1] * int(length) for length in np.random.default_rng(shifted(longest)).integers(1, longest, num_rows)]


def test_the_first_of_ranks_that_share_rows_has_all_of_them() -> None:
    first, second = np.array([0, 3]), np.array([1, 2])
    dealt = [rows.tolist() for rows in to_leaders([first, second], 3)]
    assert dealt == [[0, 3], [], [], [1, 2], [], []]
    assert to_leaders([first, second], 1) == [first, second]


def test_without_a_role_s_wish_each_rank_has_equally_many_rows() -> None:
    shards = shard_rows(Batch.from_rows(prompts=[[1]] * 5), 2, None)
    assert [shard.tolist() for shard in shards] == [[0, 1, 2], [3, 4]]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 7])
@pytest.mark.parametrize("factor", [1, 4])
def test_joined_results_are_in_the_order_of_the_rows(num_ranks: int, factor: int) -> None:
    batch = Batch.from_rows(prompts=ragged(11, 20))
    shards = shard_evenly(batch, num_ranks)
    parts = [
        Batch.from_rows(responses=[[int(row) * 10 + sample] for row in shard for sample in range(factor)])
        for shard in shards
    ]
    joined = join_shards(shards, parts)
    assert joined is not None
    assert joined["responses"].values.tolist() == [row * 10 + sample for row in range(11) for sample in range(factor)]


def test_ranks_without_rows_need_no_columns() -> None:
    shards = shard_evenly(Batch.from_rows(prompts=[[1]]), 2)
    made = Batch.from_rows(values=[[1.0]])
    joined = join_shards(shards, [made if len(shard) else None for shard in shards])
    assert joined is not None
    assert joined["values"].values.tolist() == [1.0]


def test_no_columns_anywhere_are_no_columns() -> None:
    assert join_shards([np.array([0]), np.array([1])], [None, None]) is None


@pytest.mark.parametrize(
    "second", [None, Batch.from_rows(values=[[1.0], [2.0]]), Batch.from_rows(values=np.empty((0, 1)))]
)
def test_ranks_that_disagree_on_their_rows_are_a_bug(second: Batch | None) -> None:
    with pytest.raises(RuntimeError, match="same multiple"):
        join_shards([np.array([0]), np.array([1])], [Batch.from_rows(values=[[1.0]]), second])


@pytest.mark.parametrize("shards", [[[0, 1]], [[0], [0]], [[0], [2]], [[0], [1, 1]]])
def test_shards_that_lose_or_repeat_rows_are_a_bug(shards: list[list[int]]) -> None:
    with pytest.raises(RuntimeError, match="shard must place 2 rows once"):
        shard_rows(Batch.from_rows(prompts=[[1], [2]]), 2, lambda *_: [np.array(shard) for shard in shards])
