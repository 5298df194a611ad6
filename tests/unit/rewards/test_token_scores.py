"""Scores inside a response: the values that a scorer may return, and the token that gets the score of a step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rewards.manager import weighted_sum
from rewards.samples import Scored
from rewards.token_scores import place_steps, read_step_scores, read_token_scores
from splitppo.config.sections.reward import Term

# "ab", nothing (a special token, or the first bytes of a character), "c", "de"
SPANS = [(0, 2), (2, 2), (2, 3), (3, 5)]


@pytest.mark.parametrize(("end", "token"), [(1, 0), (2, 0), (3, 2), (4, 3), (5, 3)])
def test_a_step_is_scored_on_the_token_that_holds_its_last_character(end: int, token: int) -> None:
    placed = place_steps(Scored(0.5, step_scores=[(0, end, 2.0)]), SPANS)
    assert placed.token_scores == tuple(2.0 * (index == token) for index in range(4))
    assert (placed.score, placed.total, placed.step_scores) == (0.5, 2.5, ())


def test_steps_add_up_with_each_other_and_with_token_scores() -> None:
    scored = Scored(1.0, token_scores=(0.25, 0.0, 0.5, 0.0), step_scores=[(0, 1, 1.0), (1, 2, 2.0), (0, 5, -4.0)])
    assert place_steps(scored, SPANS).token_scores == (3.25, 0.0, 0.5, -4.0)
    assert scored.total == place_steps(scored, SPANS).total == 0.75


def test_weights_apply_to_every_part_of_a_score() -> None:
    results = [
        Scored(1.0, token_scores=(1.0, 2.0)),
        Scored(2.0, token_scores=(4.0, 8.0), step_scores=[(0, 1, 3.0)]),
        Scored(4.0),
    ]
    terms = [Term(name="a", weight=0.5), Term(name="b", weight=2.0), Term(name="c", weight=-1.0)]
    summed = weighted_sum(terms, results)
    assert (summed.score, summed.token_scores, summed.step_scores) == (0.5, (8.5, 17.0), ((0, 1, 6.0),))
    assert summed.extra == {"a_score": 4.0, "b_score": 17.0, "c_score": 4.0}
    assert summed.total == sum(term.weight * scored.total for term, scored in zip(terms, results, strict=True))


def test_arrays_and_nothing_at_all_are_taken() -> None:
    assert read_token_scores(np.array([0.5, 1.0], np.float32), 2) == (0.5, 1.0)
    assert read_token_scores([], 0) == read_token_scores(None, None) == ()
    assert read_step_scores(np.array([[0, 2, 0.5]]), 2) == ((0, 2, 0.5),)
    assert read_step_scores(None, 0) == read_step_scores([], 0) == ()


@pytest.mark.parametrize(
    ("value", "num_tokens", "sentence"),
    [
        ([1.0], 2, "returned 1 token_scores for 2 response tokens"),
        ([1.0, float("nan")], 2, "returned nan, which is not a finite number"),
        ([1e308, 1e308], 2, r"returned 1e\+308; expected a number from -1e\+12 to 1e\+12"),
        ([-3.4e38], 1, r"returned -3.4e\+38; expected a number from -1e\+12 to 1e\+12"),
        ([10**400], 1, "returned a number that no float can hold"),
        ([1.0, "2"], 2, "returned '2', expected a number in token_scores"),
        (1.0, 1, "returned 1.0 as token_scores, expected a list"),
        ([1.0], None, "but takes no token_spans"),
    ],
)
def test_token_scores_that_are_none_cost_one_sentence(value: Any, num_tokens: int | None, sentence: str) -> None:
    with pytest.raises((TypeError, ValueError), match=sentence):
        read_token_scores(value, num_tokens)


@pytest.mark.parametrize(
    ("step", "sentence"),
    [
        ([0, 4, 1.0], r"the step \[0, 4\), expected 0 <= start < end <= 3"),
        ([-1, 2, 1.0], r"the step \[-1, 2\)"),
        ([2, 2, 1.0], r"the step \[2, 2\)"),
        ([2, 1, 1.0], r"the step \[2, 1\)"),
        ([0, 1.5, 1.0], "1.5 as a character's place in step_scores, expected an integer"),
        ([0, 1, float("inf")], "returned inf, which is not a finite number"),
        ([0, 1], "a step of 2 items"),
        ("abc", "'abc' as a step of step_scores, expected a list"),
        (7, "7 as a step of step_scores, expected a list"),
    ],
)
def test_steps_outside_the_response_cost_one_sentence(step: Any, sentence: str) -> None:
    with pytest.raises((TypeError, ValueError), match=sentence):
        read_step_scores([step], 3)
