"""Contexts inside a response: what the column `segments` says, and sentences for what it cannot say."""

import numpy as np
import pytest

from splitppo.batch import Batch
from splitppo.segments import Segments, context_tokens, num_contexts


def rows(*segments: list[int], num_tokens: int = 10, num_prompt: int = 3) -> Batch:
    """Makes rows of one length with the given values of the column `segments`."""
    return Batch.from_rows(
        prompts=[[1] * num_prompt] * len(segments), responses=[[2] * num_tokens] * len(segments), segments=segments
    )


def test_a_row_is_its_first_segment_and_the_later_ones() -> None:
    segments = Segments.of(rows([], [4, 2, 7, 3], [9, 1]))

    assert segments.rows.tolist() == [0, 1, 1, 1, 2, 2]
    assert segments.begins.tolist() == [0, 0, 4, 7, 0, 9]
    assert segments.contexts.tolist() == [0, 0, 2, 3, 0, 1]
    assert segments.ends.tolist() == [10, 4, 7, 10, 9, 10]
    assert segments.is_first.tolist() == [True, True, False, False, True, False]


def test_the_prompt_belongs_to_the_first_segment_alone() -> None:
    batch = rows([], [4, 2, 7, 3])

    assert Segments.of(batch).lengths(batch).tolist() == [13, 7, 3, 3]
    # Privileged tokens belong to each segment of their row.
    told = batch.merge(Batch.from_rows(privileged_tokens=[[], [1] * 5]))
    assert Segments.of(told).lengths(told).tolist() == [13, 12, 8, 8]


def test_without_the_column_every_row_is_one_segment() -> None:
    batch = Batch.from_rows(prompts=[[1], [1]], responses=[[2, 3], []])
    segments = Segments.of(batch)

    assert (segments.rows.tolist(), segments.ends.tolist()) == ([0, 1], [2, 0])
    assert segments.lengths(batch).tolist() == [3, 1]


def test_contexts_and_their_tokens_are_counted_by_row() -> None:
    column = rows([], [4, 2, 7, 3], [9, 1])["segments"]

    assert num_contexts(column).tolist() == [1, 3, 2]
    assert context_tokens(column).tolist() == [0, 5, 1]


def test_a_batch_without_rows_has_no_segments() -> None:
    assert Segments.of(rows([1, 1]).take(np.empty(0, np.int64))).rows.tolist() == []


def test_a_first_segment_without_tokens_and_one_of_its_context_alone_are_segments() -> None:
    segments = Segments.of(rows([0, 4, 4, 6]))

    assert segments.begins.tolist() == [0, 0, 4]
    assert segments.ends.tolist() == [0, 4, 10]


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ([4], "row 1: expected two values for each later segment, got 1"),
        ([4, 2, 7], "row 1: expected two values for each later segment, got 3"),
        ([7, 2, 4, 2], "begin in ascending order in a response of 10 tokens, got one that begins at 4"),
        ([4, 2, 4, 2], "begin in ascending order in a response of 10 tokens, got one that begins at 4"),
        ([10, 1], "in a response of 10 tokens, got one that begins at 10"),
        ([-1, 1], "in a response of 10 tokens, got one that begins at -1"),
        ([4, 0], "expected a context of 1 to 6 tokens, those of the segment that begins at 4, got 0"),
        ([4, 2, 7, -3], "expected a context of 1 to 3 tokens, those of the segment that begins at 7, got -3"),
        ([4, 4, 7, 3], "expected a context of 1 to 3 tokens, those of the segment that begins at 4, got 4"),
        ([4, 2**31 - 1], "expected a context of 1 to 6 tokens"),
    ],
)
def test_a_column_that_divides_no_row_is_refused_with_row_and_numbers(wrong: list[int], sentence: str) -> None:
    with pytest.raises(ValueError, match=r"^column 'segments', row 1: ") as error:
        Segments.of(rows([], wrong))

    assert sentence in str(error.value)
