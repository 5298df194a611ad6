"""Which turn a context returns to is found by its tokens alone."""

from __future__ import annotations

import numpy as np
import pytest

from controller.tracking.record.contexts import followed_turns

PROMPT = [1, 2]
# Turn 1 is [3], turn 2 is [5]: the model has seen [1, 2, 3, 4] when it says it.
FIRST = [3, 4, 5]


@pytest.mark.parametrize(
    ("context", "turn"),
    [
        ([1, 2, 3, 9], 1),
        ([1, 2, 3, 4, 5, 9], 2),
        ([1, 2, 3], 0),  # nothing follows the turn
        ([1, 2, 9], 0),
        ([1, 9, 3, 9], 0),  # another prompt
        ([3, 9], 0),
    ],
)
def test_a_context_follows_the_last_turn_whose_tokens_it_begins_with(context: list[int], turn: int) -> None:
    response = np.array([*FIRST, *context, 8], np.int32)
    ends = [0, 2, len(response) - 1]
    assert [*followed_turns(np.array(PROMPT, np.int32), response, [3, len(context)], ends)] == [turn]


def test_a_context_may_follow_a_turn_of_a_later_context() -> None:
    other = [7, 6]  # a sub-agent, which says 6
    main = [1, 2, 3, 9, 5]  # back to turn 1, the model says 5
    sub = [7, 6, 9, 4]  # back to the sub-agent's turn
    response = np.array([3, *other, *main, *sub], np.int32)
    segments = [1, 1, 3, 4, 8, 3]
    assert [*followed_turns(np.array(PROMPT, np.int32), response, segments, [0, 2, 7, 11])] == [0, 1, 2]


def test_each_of_a_thousand_equal_contexts_goes_on_from_the_first_turn() -> None:
    response = np.tile(np.array([7, 7, 7, 7], np.int32), 1000)
    segments = [number for start in range(4, 4000, 4) for number in (start, 3)]
    followed = [*followed_turns(np.array([7], np.int32), response, segments, [0, *range(7, 4000, 4)])]
    assert followed == [1] * 999
