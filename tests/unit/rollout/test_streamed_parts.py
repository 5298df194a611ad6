"""Responses that have ended become parts of a streamed command."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.rollout.protocol import Response, begin_responses
from services.rollout.streamed_parts import StreamedParts, response_rows
from splitppo.balance import part_ends
from splitppo.batch import Batch
from tests.support.roles import RecordedProgress


def make_rows(places: list[list[int]] | None) -> Batch:
    rows = Batch.from_rows(prompts=[[4], [5, 6], [7]], seeds=[[10, 11], [12, 13], [14, 15]])
    return rows if places is None else rows.merge(Batch.from_rows(places=places))


def end(parts: StreamedParts, *responses: Response) -> None:
    for response in responses:
        response.extend([response.seed, 3], [-0.5, -response.seed / 8])
    parts.add(responses)


def values(rows: Batch, column: str) -> list[list[float]]:
    return [row.tolist() for row in rows[column].rows()]


def test_a_part_holds_those_that_end_next_in_the_order_of_the_rows_and_says_which_rows_they_are() -> None:
    rows, report = make_rows([[2, 3], [8, 9], [20, 21]]), RecordedProgress()
    parts, responses = StreamedParts(rows, 2, report, 7), begin_responses(rows)
    end(parts, responses[3])
    end(parts, responses[5])
    assert not report.parts

    end(parts, responses[4], responses[0])
    assert list(report.parts) == [1]
    end(parts, responses[2], responses[1])

    assert report.versions == {7}
    assert values(report.parts[1], "places") == [[2], [9], [21]]  # of two that end in one step the lower index is first
    assert values(report.parts[1], "prompts") == [[4], [5, 6], [7]]
    assert values(report.parts[1], "seeds") == [[10], [13], [15]]
    assert values(report.parts[1], "responses") == [[10, 3], [13, 3], [15, 3]]
    assert values(report.parts[2], "places") == [[3], [8], [20]]
    assert report.parts[2]["rollout_log_probs"].values.tolist() == [-0.5, -1.375, -0.5, -1.5, -0.5, -1.75]
    assert response_rows(responses).num_rows == 6


def test_parts_do_not_depend_on_the_order_within_a_step() -> None:
    rows, reports = make_rows([[0, 1], [2, 3], [4, 5]]), (RecordedProgress(), RecordedProgress())
    for report, order in zip(reports, ([5, 2, 0, 4, 1, 3], [0, 1, 2, 3, 4, 5]), strict=True):
        parts, responses = StreamedParts(rows, 3, report, 7), begin_responses(rows)
        end(parts, *(responses[index] for index in order))
    assert values(reports[0].parts[1], "places") == values(reports[1].parts[1], "places") == [[0], [1], [2]]


def test_a_rank_without_rows_reports_every_part_at_once() -> None:
    report = RecordedProgress()
    StreamedParts(Batch.from_rows(prompts=[], seeds=[], places=[]), 3, report, 7)
    assert [(part, rows.num_rows) for part, rows in report.parts.items()] == [(1, 0), (2, 0), (3, 0)]
    assert set(report.parts[1].columns) == {"prompts", "seeds", "responses", "rollout_log_probs", "places"}


def test_rows_without_places_have_no_parts() -> None:
    rows, report = make_rows(None), RecordedProgress()
    parts = StreamedParts(rows, 0, report, 7)
    end(parts, *begin_responses(rows))

    assert not report.parts


@pytest.mark.parametrize(
    ("num_responses", "num_parts", "ends"),
    [
        (64, 4, [24, 44, 54, 64]),
        (64, 6, [16, 32, 48, 56, 60, 64]),
        (64, 2, [32, 64]),
        (7, 3, [4, 6, 7]),
        (8, 8, [1, 2, 3, 4, 5, 6, 7, 8]),
        (6, 4, [3, 4, 5, 6]),
        (2, 3, [1, 2, 2]),
        (0, 2, [0, 0]),
    ],
)
def test_a_part_takes_half_of_what_is_left_but_no_more_than_its_bound_and_leaves_one_to_those_behind(
    num_responses: int, num_parts: int, ends: list[int]
) -> None:
    assert part_ends(num_responses, num_parts) == ends


@given(st.integers(0, 200), st.integers(1, 30))
def test_parts_hold_every_response_once_and_only_the_last_ones_may_be_empty(num_responses: int, num_parts: int) -> None:
    ends = part_ends(num_responses, num_parts)
    sizes = [end - begin for begin, end in zip([0, *ends], ends, strict=False)]
    assert len(ends) == num_parts
    assert ends[-1] == num_responses
    assert [size for size in sizes if size] == sizes[: min(num_parts, num_responses)]


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_a_log_prob_that_is_not_finite_is_an_error_not_a_token(wrong: float) -> None:
    response = begin_responses(make_rows(None))[0]

    with pytest.raises(FloatingPointError, match="no finite log-prob"):
        response.extend([1, 2], [-1.0, wrong])
    assert not response.tokens
