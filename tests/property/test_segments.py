"""Rows with any contexts: divided and put back, they are as before, and any other column is refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.engine.batching.packing import MicroBatchLimits, plan_micro_batches
from services.engine.batching.segments import SegmentRows
from splitppo.batch import Batch, Column
from splitppo.segments import Segments, context_tokens, num_contexts

# Of one row: (tokens of the context, tokens sampled after it) of each segment.
PARTS = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 4)), min_size=1, max_size=4)


def batch_of(rows: list[list[tuple[int, int]]]) -> Batch:
    """Rows of these parts; the tokens of all responses count up from 0."""
    segments: list[list[int]] = []
    lengths = []
    for (_, sampled), *later in rows:
        length = sampled
        places = []
        for context, of_turn in later:
            places += [length, context]
            length += context + of_turn
        segments.append(places)
        lengths.append(length)
    tokens = np.arange(sum(lengths), dtype=np.int32)
    responses = Column(tokens, np.array(lengths, np.int32)).rows()
    return Batch.from_rows(prompts=[[7] * row[0][0] for row in rows], responses=responses, segments=segments)


@given(st.lists(PARTS, min_size=1, max_size=5))
def test_dividing_rows_and_putting_them_back_is_identity_but_on_contexts(rows: list[list[tuple[int, int]]]) -> None:
    batch = batch_of(rows)
    divided = SegmentRows.of(batch)
    parts = [part for row in rows for part in row]

    assert divided.batch["prompts"].lengths.tolist() == [context for context, _ in parts]
    assert divided.batch["responses"].lengths.tolist() == [sampled for _, sampled in parts]
    put_back = divided.put_back(divided.batch["responses"])
    is_sampled = [
        is_sampled
        for row in rows
        for place, (context, sampled) in enumerate(row)
        for is_sampled in [False] * (context if place else 0) + [True] * sampled
    ]
    assert put_back.lengths.tolist() == batch["responses"].lengths.tolist()
    assert put_back.values.tolist() == (batch["responses"].values * np.array(is_sampled, np.int32)).tolist()


@given(st.lists(PARTS, min_size=1, max_size=5))
def test_facts_about_segments_are_those_of_the_parts(rows: list[list[tuple[int, int]]]) -> None:
    batch = batch_of(rows)
    assert Segments.of(batch).lengths(batch).tolist() == [context + sampled for row in rows for context, sampled in row]
    assert num_contexts(batch["segments"]).tolist() == [len(row) for row in rows]
    assert context_tokens(batch["segments"]).tolist() == [sum(context for context, _ in row[1:]) for row in rows]


@given(st.lists(st.integers(-2, 9), max_size=6))
def test_a_column_is_taken_if_its_contexts_lie_one_behind_the_other_in_the_response(values: list[int]) -> None:
    begins = values[::2]
    contexts = values[1::2]
    ends = [*begins[1:], 8]
    is_right = len(begins) == len(contexts) and all(
        begin >= 0 and context >= 1 and begin + context <= end
        for begin, context, end in zip(begins, contexts, ends, strict=False)
    )
    batch = Batch.from_rows(prompts=[[1]], responses=[[2] * 8], segments=[values])
    if is_right:
        assert Segments.of(batch).begins.tolist() == [0, *begins]
    else:
        with pytest.raises(ValueError, match=r"^column 'segments', row 0: expected "):
            Segments.of(batch)


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(1, 20)), min_size=1, max_size=20),
    st.integers(1, 60),
    st.one_of(st.none(), st.integers(1, 4)),
    st.booleans(),
    st.integers(1, 5),
)
def test_rows_that_stay_together_do_and_every_row_is_in_one_micro_batch(
    rows: list[tuple[int, int]], max_tokens: int, max_rows: int | None, packed: bool, at_least: int
) -> None:
    together = np.array([number for number, _ in rows])
    lengths = np.array([length for _, length in rows], np.int32)
    limits = MicroBatchLimits(packed, max_tokens, max_rows)
    parts = plan_micro_batches(lengths, limits, together=together, at_least=at_least)

    assert sorted(np.concatenate(parts).tolist()) == list(range(len(rows)))
    assert len(parts) >= at_least
    where = {int(number) for part in parts for number in np.unique(together[part])}
    assert sum(len(np.unique(together[part])) for part in parts) == len(where)
    for part in parts:
        numbers = together[part]
        assert np.count_nonzero(np.diff(numbers)) == max(0, len(np.unique(numbers)) - 1)  # they are neighbours
        if len(np.unique(numbers)) < 2:
            continue
        if max_rows is not None:
            assert len(part) <= max_rows
        elif packed:
            assert lengths[part].sum() <= max_tokens
        else:
            assert len(part) * lengths[part].max() <= max_tokens
