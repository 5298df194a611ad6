"""Ended responses as parts of a streamed command."""

from __future__ import annotations

import pytest

from services.rollout.protocol import Response, empty_responses
from services.rollout.streamed_parts import StreamedParts, response_rows
from splitppo.batch import Batch
from tests.roles import RecordedProgress


def make_rows(groups: list[int] | None) -> Batch:
    rows = Batch.from_rows(prompts=[[4], [5, 6], [7]], seeds=[[10, 11], [12, 13], [14, 15]])
    return rows if groups is None else rows.merge(Batch.from_rows(groups=[[group] for group in groups]))


def end(response: Response, parts: StreamedParts) -> None:
    response.extend([response.seed, 3], [-0.5, -response.seed / 8])
    parts.add(response)


def test_a_group_is_a_part_once_its_last_response_has_ended_and_its_rows_keep_their_order() -> None:
    rows, report = make_rows([0, 0, 2]), RecordedProgress()
    parts, responses = StreamedParts(rows, report, 7), empty_responses(rows)
    for index in (3, 5, 1, 0):
        end(responses[index], parts)
    assert not report.parts

    end(responses[4], parts)
    assert list(report.parts) == [3]
    end(responses[2], parts)

    assert report.versions == {7}
    assert [row.tolist() for row in report.parts[1]["prompts"].rows()] == [[4], [4], [5, 6], [5, 6]]
    assert [row.tolist() for row in report.parts[1]["responses"].rows()] == [[seed, 3] for seed in (10, 11, 12, 13)]
    assert report.parts[3]["rollout_log_probs"].values.tolist() == [-0.5, -1.75, -0.5, -1.875]
    assert response_rows(responses).num_rows == 6


def test_rows_without_groups_have_no_parts() -> None:
    rows, report = make_rows(None), RecordedProgress()
    parts = StreamedParts(rows, report, 7)
    for response in empty_responses(rows):
        end(response, parts)

    assert not report.parts


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_a_log_prob_that_is_not_finite_is_an_error_not_a_token(wrong: float) -> None:
    response = empty_responses(make_rows(None))[0]

    with pytest.raises(FloatingPointError, match="no finite log-prob"):
        response.extend([1, 2], [-1.0, wrong])
    assert not response.tokens
