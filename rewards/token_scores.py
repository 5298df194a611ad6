"""Reads and combines scores of tokens and of steps (spans of characters) inside a response.

Scores of tokens and of steps add to the score of the response as a whole. A step is a span [start, end) of characters
in the decoded response. Scoring processes import this module, so it imports nothing heavy.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from rewards.returned import finite_number
from rewards.samples import Scored, Span, Step


def read_token_scores(value: Any, num_tokens: int | None) -> tuple[float, ...]:
    """Checks a scorer's field `token_scores` and returns one number per response token; () if the field is None.

    `num_tokens` is None if the scorer does not take token spans. TypeError or ValueError if the field is anything else.
    """
    if value is None:
        return ()
    if num_tokens is None:
        raise ValueError("the scorer returned token_scores, but takes no token_spans, which say what the tokens are")
    scores = tuple(finite_number(score, "a number in token_scores") for score in _items(value, "token_scores"))
    if len(scores) != num_tokens:
        raise ValueError(f"the scorer returned {len(scores)} token_scores for {num_tokens} response tokens")
    return scores


def read_step_scores(value: Any, num_characters: int) -> tuple[Step, ...]:
    """Checks a scorer's field `step_scores`, [[start, end, score], ...], and returns the steps; () if it is None.

    TypeError or ValueError if the field is anything else, or a step lies outside the `num_characters` of the response.
    """
    steps: list[Step] = []
    for item in () if value is None else _items(value, "step_scores"):
        step = _items(item, "a step of step_scores")
        if len(step) != 3:
            raise ValueError(f"the scorer returned a step of {len(step)} items, expected [start, end, score]")
        start, end = (_character(place) for place in step[:2])
        if not 0 <= start < end <= num_characters:
            raise ValueError(
                f"the scorer returned the step [{start}, {end}), expected 0 <= start < end <= {num_characters}, the"
                " characters of solution_str"
            )
        steps.append((start, end, finite_number(step[2], "a number in step_scores")))
    return tuple(steps)


def place_steps(scored: Scored, token_spans: Sequence[Span]) -> Scored:
    """Moves the score of each step to the response token that contains the last character of the step.

    `token_spans` are the character spans of the response tokens, in order and without gaps. The result has no steps.
    """
    if not scored.step_scores:
        return scored
    ends = [end for _, end in token_spans]
    scores = list(scored.token_scores) or [0.0] * len(ends)
    for _, end, score in scored.step_scores:
        scores[bisect_right(ends, end - 1)] += score
    return replace(scored, token_scores=tuple(scores), step_scores=())


def weighted(weight: float, scored: Scored) -> Scored:
    """Multiplies all scores of a result by a weight."""
    return replace(
        scored,
        score=weight * scored.score,
        token_scores=[weight * score for score in scored.token_scores],
        step_scores=[(start, end, weight * score) for start, end, score in scored.step_scores],
    )


def _items(value: Any, name: str) -> list[Any]:
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise TypeError(f"the scorer returned {value!r:.60} as {name}, expected a list")
    return list(value)


def _character(value: Any) -> int:
    """Returns a character's place as an integer; ValueError for another number."""
    number = finite_number(value, "a character's place in step_scores")
    if number != int(number):
        raise ValueError(f"the scorer returned {number} as a character's place in step_scores, expected an integer")
    return int(number)
