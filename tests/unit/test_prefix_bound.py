"""What the correctness of prefixes explains of the returns of sort_letters, from recorded responses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from benchmarks.prefix_bound import explained_by_groups, tokens_of


def response(letters: str, rewards: list[float]) -> dict[str, Any]:
    """A response to `sort ba`, one token for the marker and one for each letter, and EOS."""
    ends = [5, *range(6, 6 + len(letters)), 5 + len(letters) + len("<eos>")]
    return {
        "response": f"#### {letters}<eos>",
        "ground_truth": "ab",
        "ends": ends,
        "value": [0.25] * len(ends),
        "rewards": rewards,
    }


RIGHT = response("ab", [0.0, -0.5, 0.0, 1.0])
WRONG = response("ba", [0.0, 0.0, 0.0, 0.0])
LATE = response("aa", [0.0, 0.0, 0.0, 0.0])


def test_a_token_belongs_to_its_position_and_to_whether_the_answer_goes_on_from_before_it() -> None:
    values_N, returns_N, groups_N = tokens_of([RIGHT, WRONG, LATE])
    assert values_N.tolist() == [0.25] * 12
    assert returns_N.tolist() == [0.5, 0.5, 1.0, 1.0, *[0.0] * 8]
    assert (groups_N // 2).tolist() == [0, 1, 2, 3] * 3
    assert (groups_N % 2).tolist() == [1, 1, 1, 1, 1, 1, 0, 0, 1, 1, 1, 0]


def test_a_response_that_goes_on_after_the_whole_answer_is_wrong() -> None:
    groups_N = tokens_of([response("abc", [0.0] * 5)])[2]
    assert (groups_N % 2).tolist() == [1, 1, 1, 1, 0]


def test_groups_explain_what_their_means_explain() -> None:
    returns_N = np.array([0.0, 1.0, 4.0, 6.0])
    spread, within = returns_N.var(), (0.25 * 2 + 1.0 * 2) / 4
    expected = 1 - within / (spread + 1e-5)
    assert explained_by_groups(np.array([7, 7, 2, 2]), returns_N) == pytest.approx(expected)
    assert explained_by_groups(np.array([3, 3, 3, 3]), returns_N) == pytest.approx(0.0, abs=1e-4)
    assert explained_by_groups(np.array([7, 2, 7, 2]), returns_N) < expected / 2
