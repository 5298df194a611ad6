"""Rows with the same images share micro-batches and ranks as far as budgets and balance allow."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.engine.batching.packing import MicroBatchLimits, plan_micro_batches, row_lengths
from services.engine.batching.shared_images import partition_rows, together_for_images
from services.roles.sharding import row_costs, shard_by_tokens
from splitppo.balance import partition
from splitppo.batch import Batch


def batch_of(lengths: Sequence[int], images: Sequence[int | None]) -> Batch:
    """Rows of these numbers of tokens, with the image of this number or none."""
    return Batch.from_rows(
        prompts=[[5] * (length - 1) for length in lengths],
        responses=[[6] for _ in lengths],
        images=[[] if image is None else [image] for image in images],
        image_sizes=[[] if image is None else [1, 2, 2] for image in images],
    )


def planned(batch: Batch, limits: MicroBatchLimits) -> list[np.ndarray]:
    lengths = row_lengths(batch)
    return plan_micro_batches(lengths, limits, together=together_for_images(batch, lengths, limits))


def num_computed(parts: Sequence[np.ndarray], images: Sequence[int | None]) -> int:
    """How many images are computed, each once for each part that has it."""
    return sum(len({images[row] for row in part} - {None}) for part in parts)


def test_samples_of_a_prompt_share_a_micro_batch() -> None:
    images = [row // 4 for row in range(16)]
    lengths = [10, 13, 9, 12] * 4
    batch = batch_of(lengths, images)
    limits = MicroBatchLimits(packed=True, max_tokens=100)
    assert num_computed(plan_micro_batches(row_lengths(batch), limits), images) > 4
    assert num_computed(planned(batch, limits), images) == 4
    in_fours = MicroBatchLimits(packed=True, max_tokens=100, max_rows=4)
    assert sorted(map(len, planned(batch, in_fours))) == [4] * 4
    assert num_computed(planned(batch, in_fours), images) == 4


def test_more_samples_than_half_a_micro_batch_takes_are_divided() -> None:
    batch = batch_of([10] * 12, [0] * 12)
    parts = planned(batch, MicroBatchLimits(packed=True, max_tokens=40))
    assert all(len(part) <= 4 for part in parts)
    assert len(parts) == 3


@given(
    rows=st.lists(st.tuples(st.integers(2, 30), st.none() | st.integers(0, 3)), min_size=1, max_size=24),
    packed=st.booleans(),
    max_rows=st.none() | st.integers(1, 4),
)
def test_every_row_has_one_place_and_limits_hold(
    rows: list[tuple[int, int | None]], packed: bool, max_rows: int | None
) -> None:
    lengths, images = zip(*rows, strict=True)
    batch = batch_of(lengths, images)
    limits = MicroBatchLimits(packed=packed, max_tokens=40, max_rows=max_rows)
    parts = planned(batch, limits)
    assert sorted(np.concatenate(parts).tolist()) == [*range(len(rows))]
    for part in parts:
        tokens = row_lengths(batch)[part]
        if max_rows is not None:
            assert len(part) <= max_rows
        elif packed:
            assert tokens.sum() <= 40 or len(part) == 1
        else:
            assert tokens.max(initial=0) * len(part) <= 40 or len(part) == 1


@given(
    rows=st.lists(st.tuples(st.integers(2, 30), st.none() | st.integers(0, 3)), min_size=1, max_size=24),
    num_ranks=st.integers(1, 4),
)
def test_every_rank_has_rows_if_there_are_enough(rows: list[tuple[int, int | None]], num_ranks: int) -> None:
    lengths, images = zip(*rows, strict=True)
    parts = shard_by_tokens(batch_of(lengths, images), num_ranks)
    assert sorted(np.concatenate(parts).tolist()) == [*range(len(rows))]
    assert all(len(part) for part in parts) or len(rows) < num_ranks


def test_samples_of_a_prompt_go_to_one_rank_and_ranks_have_nearly_equal_work() -> None:
    rng = np.random.default_rng(0)
    images = [row // 8 for row in range(512)]
    batch = batch_of(rng.integers(100, 1000, 512).tolist(), images)
    parts = shard_by_tokens(batch, 4)
    assert num_computed(parts, images) <= 64 + 8
    costs = row_costs(batch)
    of_ranks = [costs[part].sum() for part in parts]
    assert max(of_ranks) == pytest.approx(costs.sum() / 4, rel=0.01)


def test_rows_of_text_are_divided_as_ever() -> None:
    lengths = [5, 30, 12, 7, 9, 21]
    batch = batch_of(lengths, [None] * 6).select(["prompts", "responses"])
    costs = row_costs(batch)
    assert together_for_images(batch, row_lengths(batch), MicroBatchLimits(packed=True, max_tokens=40)) is None
    for found, expected in zip(partition_rows(batch, np.arange(6), costs, 2), partition(costs, 2), strict=True):
        assert np.array_equal(found, expected)
