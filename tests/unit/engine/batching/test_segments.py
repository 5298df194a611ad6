"""Rows with several contexts are divided into rows of one context, and put back."""

from __future__ import annotations

import numpy as np
import pytest

from services.engine.batching.mini_batches import plan_mini_batches
from services.engine.batching.packing import MicroBatchLimits, collate, plan_micro_batches
from services.engine.batching.segments import SegmentRows
from splitppo.batch import Batch, Column
from splitppo.config import ActorConfig
from tests.support.engines import CPU, MAX_RESPONSE
from tests.support.episodes import make_episodes, sampled_tokens, with_privileged_tokens

EPISODES = make_episodes()
PRIVILEGED = with_privileged_tokens(EPISODES)


def as_lists(column: Column) -> list[list[float]]:
    return [row.tolist() for row in column.rows()]


def test_a_segment_is_a_row_with_its_context_as_the_prompt() -> None:
    divided = SegmentRows.of(EPISODES.batch)

    assert as_lists(divided.batch["prompts"]) == [segment.context.tolist() for segment in EPISODES.segments]
    assert as_lists(divided.batch["responses"]) == [segment.sampled.tolist() for segment in EPISODES.segments]
    assert divided.rows.tolist() == [segment.row for segment in EPISODES.segments]
    assert divided.first_tokens.tolist() == [segment.first for segment in EPISODES.segments]
    assert "segments" not in divided.batch


def test_each_segment_begins_with_the_privileged_tokens_of_its_row() -> None:
    divided = SegmentRows.of(PRIVILEGED.batch)

    assert as_lists(divided.batch["prompts"]) == [segment.context.tolist() for segment in PRIVILEGED.segments]
    assert as_lists(divided.batch["responses"]) == [segment.sampled.tolist() for segment in PRIVILEGED.segments]
    assert divided.first_tokens.tolist() == [segment.first for segment in PRIVILEGED.segments]
    assert "privileged_tokens" not in divided.batch


def test_rows_of_one_context_begin_with_privileged_tokens_and_a_rank_may_have_none() -> None:
    batch = Batch.from_rows(prompts=[[1], [2, 3]], responses=[[5, 6], []], privileged_tokens=[[8, 9], []])

    assert as_lists(SegmentRows.of(batch).batch["prompts"]) == [[8, 9, 1], [2, 3]]
    of_no_rows = SegmentRows.of(batch.take(np.empty(0, np.int64))).batch
    assert (of_no_rows.num_rows, of_no_rows["prompts"].values.dtype) == (0, np.int32)


def test_columns_of_tokens_are_cut_and_others_repeated() -> None:
    batch = EPISODES.batch
    top_ids = np.arange(3 * len(batch["responses"].values), dtype=np.int32)
    batch = batch.merge(Batch(batch.num_rows, {"teacher_top_ids": Column(top_ids, batch["responses"].lengths * 3)}))
    divided = SegmentRows.of(batch).batch

    places = list(sampled_tokens(EPISODES))
    assert as_lists(divided["advantages"]) == [batch["advantages"].values[own].tolist() for own in places]
    assert as_lists(divided["teacher_top_ids"]) == [top_ids.reshape(-1, 3)[own].reshape(-1).tolist() for own in places]
    seeds = batch["seeds"].values
    assert divided["seeds"].values.tolist() == [seeds[segment.row] for segment in EPISODES.segments]


@pytest.mark.parametrize("width", [1, 3])
def test_what_is_cut_is_put_back_with_0_on_contexts(width: int) -> None:
    responses = EPISODES.batch["responses"]
    values = np.arange(1, 1 + width * len(responses.values), dtype=np.int32)
    name = "teacher_top_ids" if width > 1 else "responses"
    column = Column(values, responses.lengths * np.int32(width))
    divided = SegmentRows.of(EPISODES.batch.merge(Batch(EPISODES.batch.num_rows, {name: column})))

    put_back = divided.put_back(divided.batch[name])

    is_sampled = np.zeros(len(responses.values), np.bool_)
    is_sampled[np.concatenate(list(sampled_tokens(EPISODES)))] = True
    assert put_back.lengths.tolist() == column.lengths.tolist()
    assert put_back.values.tolist() == (values * np.repeat(is_sampled, width)).tolist()


@pytest.mark.parametrize("segments", [None, [], [[], [], []]])
def test_rows_of_one_context_stay_as_they_are(segments: list[list[int]] | None) -> None:
    batch = Batch.from_rows(prompts=[[1], [2, 3], [4]], responses=[[5, 6], [], [7]], advantages=[[0.5, 1.5], [], [2.5]])
    with_column = batch
    if segments is not None:
        with_column = batch.take(np.arange(len(segments))).merge(Batch.from_rows(segments=segments))
    divided = SegmentRows.of(with_column)

    assert divided.batch.columns.keys() == batch.columns.keys()
    for name, column in divided.batch.columns.items():
        assert column.values is with_column[name].values  # not even copied
    put_back = divided.put_back(divided.batch["advantages"])
    assert as_lists(put_back) == as_lists(with_column["advantages"])


# Micro-batches.


def test_micro_batches_consist_of_segments_and_weights_of_whole_rows() -> None:
    config = ActorConfig(model="unused", loss_agg_mode="seq-mean-token-mean")
    divided = SegmentRows.of(EPISODES.batch)
    limits = MicroBatchLimits(packed=True, max_tokens=24)
    [mini_batch] = plan_mini_batches(divided.batch, config, limits, MAX_RESPONSE, CPU)

    tokens = divided.batch["prompts"].lengths + divided.batch["responses"].lengths
    assert max(int(tokens[part].sum()) for part in mini_batch.micro_batches) <= 24
    assert sorted(np.concatenate(mini_batch.micro_batches).tolist()) == list(range(len(EPISODES.segments)))
    counted = EPISODES.batch["response_mask"].sums()
    expected = [1.0 / (len(counted) * counted[segment.row]) for segment in EPISODES.segments]
    np.testing.assert_allclose(mini_batch.weights, expected, rtol=1e-6)
    assert mini_batch.num_tokens == counted.sum()


@pytest.mark.parametrize(
    "limits", [MicroBatchLimits(True, 40), MicroBatchLimits(False, 60), MicroBatchLimits(True, 1, 3)]
)
def test_where_rows_are_kept_their_segments_are_neighbours_with_one_number(limits: MicroBatchLimits) -> None:
    divided = SegmentRows.of(EPISODES.batch)
    config = ActorConfig(model="unused")
    [mini_batch] = plan_mini_batches(divided.batch, config, limits, MAX_RESPONSE, CPU, keeps_rows=True)

    seen = []
    for part in mini_batch.micro_batches:
        tokens = collate(divided.batch.take(part), None, limits, device=CPU).tokens
        rows = divided.rows[part]
        lengths = divided.batch["responses"].lengths[part]
        assert (np.diff(tokens.row_index) >= 0).all()
        by_number = {int(number): row for number, row in zip(tokens.row_index, np.repeat(rows, lengths), strict=True)}
        assert len(by_number) == len(set(rows.tolist())) == len(set(by_number.values()))
        seen += list(dict.fromkeys(rows.tolist()))
    assert sorted(seen) == list(range(EPISODES.batch.num_rows))


def test_padded_rows_that_stay_together_are_limited_by_the_longest_segment() -> None:
    """Ten segments of 10 tokens beside one of 100 would be padded to eleven of 100."""
    lengths = np.array([100] + [10] * 10, np.int32)
    together = np.array([0] + [1] * 10)
    limits = MicroBatchLimits(packed=False, max_tokens=200)

    assert [part.tolist() for part in plan_micro_batches(lengths, limits, together=together)] == [
        [0],
        list(range(1, 11)),
    ]
    assert [len(part) for part in plan_micro_batches(lengths, limits)] == [2, 9]


def test_a_row_that_is_kept_is_in_one_micro_batch_although_it_is_longer_than_the_budget() -> None:
    lengths = np.array([9, 9, 9, 2], np.int32)
    parts = plan_micro_batches(lengths, MicroBatchLimits(packed=True, max_tokens=10), together=np.array([0, 0, 0, 1]))

    assert sorted(part.tolist() for part in parts if len(part)) == [[0, 1, 2], [3]]
