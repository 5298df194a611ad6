"""Rows are split over ranks and joined again."""

from __future__ import annotations

import numpy as np
import pytest

from services.runtime.ranks.row_group import to_leaders
from services.runtime.ranks.sharding import join_shards, shard_by_mini_batch, shard_by_tokens, shard_rows
from splitppo.batch import Batch
from tests.support.seeds import shifted


def ragged(num_rows: int, longest: int) -> list[list[int]]:
    return [[1] * int(length) for length in np.random.default_rng(shifted(longest)).integers(1, longest, num_rows)]


def tokens_of(batch: Batch, rows: np.ndarray) -> int:
    return int(batch["prompts"].lengths[rows].sum() + batch["responses"].lengths[rows].sum())


def test_each_of_two_ranks_holds_40_to_60_percent_of_the_tokens() -> None:
    batch = Batch.from_rows(prompts=ragged(37, 50), responses=ragged(37, 500))
    shards = shard_rows(batch, 2, None)
    share = tokens_of(batch, shards[0]) / tokens_of(batch, np.arange(37))
    assert 0.4 <= share <= 0.6


def test_the_first_of_ranks_that_share_rows_has_all_of_them() -> None:
    first, second = np.array([0, 3]), np.array([1, 2])
    dealt = [rows.tolist() for rows in to_leaders([first, second], 3)]
    assert dealt == [[0, 3], [], [], [1, 2], [], []]
    assert to_leaders([first, second], 1) == [first, second]


def test_before_there_are_responses_prompts_are_balanced() -> None:
    batch = Batch.from_rows(prompts=[[1] * 30, [1] * 10, [1] * 10, [1] * 10])
    assert [shard.tolist() for shard in shard_by_tokens(batch, 2)] == [[0], [1, 2, 3]]


def test_an_update_is_balanced_within_every_mini_batch() -> None:
    batch = Batch.from_rows(
        prompts=ragged(32, 50), responses=ragged(32, 300), mini_batches=[[row // 8, 3 - row // 8] for row in range(32)]
    )
    shards = shard_rows(batch, 2, shard_by_mini_batch)
    for mini_batch in range(4):
        members = np.arange(8 * mini_batch, 8 * mini_batch + 8)
        share = tokens_of(batch, np.intersect1d(shards[0], members)) / tokens_of(batch, members)
        assert 0.35 <= share <= 0.65
    assert 0.4 <= tokens_of(batch, shards[0]) / tokens_of(batch, np.arange(32)) <= 0.6


def test_mini_batches_with_an_odd_row_take_turns_in_loading_the_ranks() -> None:
    batch = Batch.from_rows(prompts=[[1] * 10] * 6, mini_batches=[[0]] * 3 + [[1]] * 3)
    assert [len(shard) for shard in shard_by_mini_batch(batch, 2)] == [3, 3]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 7])
@pytest.mark.parametrize("factor", [1, 4])
def test_joined_results_are_in_the_order_of_the_rows(num_ranks: int, factor: int) -> None:
    batch = Batch.from_rows(prompts=ragged(11, 20))
    shards = shard_by_tokens(batch, num_ranks)
    parts = [
        Batch.from_rows(responses=[[int(row) * 10 + sample] for row in shard for sample in range(factor)])
        for shard in shards
    ]
    joined = join_shards(shards, parts)
    assert joined is not None
    assert joined["responses"].values.tolist() == [row * 10 + sample for row in range(11) for sample in range(factor)]


def test_ranks_without_rows_need_no_columns() -> None:
    shards = shard_by_tokens(Batch.from_rows(prompts=[[1]]), 2)
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
