"""Rows are dealt to ranks so that each computes nearly as long."""

from __future__ import annotations

import numpy as np

from services.roles.sharding import shard_by_mini_batch, shard_by_tokens
from services.runtime.ranks.sharding import shard_rows
from splitppo.batch import Batch
from tests.support.seeds import shifted


def ragged(num_rows: int, longest: int) -> list[list[int]]:
    return [[1] * int(length) for length in np.random.default_rng(shifted(longest)).integers(1, longest, num_rows)]


def tokens_of(batch: Batch, rows: np.ndarray) -> int:
    return int(batch["prompts"].lengths[rows].sum() + batch["responses"].lengths[rows].sum())


def test_each_of_two_ranks_holds_40_to_60_percent_of_the_tokens() -> None:
    batch = Batch.from_rows(prompts=ragged(37, 50), responses=ragged(37, 500))
    shards = shard_rows(batch, 2, shard_by_tokens)
    share = tokens_of(batch, shards[0]) / tokens_of(batch, np.arange(37))
    assert 0.4 <= share <= 0.6


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
