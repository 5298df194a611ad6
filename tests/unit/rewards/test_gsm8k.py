"""The GSM8K scorer: on hand-made responses, and on the data set's own solutions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rewards.gsm8k import compute_flexible_score, compute_score, extract_answer

DATA = Path(__file__).parents[4] / "shared" / "data" / "gsm8k"


@pytest.mark.parametrize(
    ("response", "ground_truth", "score"),
    [
        ("48/2 = 24\n48+24 = 72\n#### 72", "72", 1.0),
        ("#### 1,200", "1200", 1.0),
        ("#### $1,200", "1200", 1.0),
        ("#### -5", "-5", 1.0),
        ("#### 0.5", "0.5", 1.0),
        ("#### 72", "1,072", 0.0),
        ("#### 1 no, #### 72", "72", 1.0),  # the last one counts
        ("#### 72 no, #### 1", "72", 0.0),
        ("#### 72.0", "72", 0.0),  # equality of strings, not of numbers
        ("the answer is 72", "72", 0.0),  # no marker
        ("####72", "72", 0.0),
        ("#### seventy-two", "72", 0.0),
        ("", "72", 0.0),
        ("#### 72" + " padding" * 50, "72", 0.0),  # too far from the end
    ],
)
def test_strict_wants_the_number_behind_the_last_marker(response: str, ground_truth: str, score: float) -> None:
    assert compute_score("openai/gsm8k", response, ground_truth) == score


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("so it costs $1,200.", 1.0),
        ("1200 dollars", 1.0),
        ("#### 1,200", 1.0),
        ("1200 on day 2", 0.0),
        ("1200.50", 0.0),
        ("none", 0.0),
    ],
)
def test_flexible_takes_the_last_number(response: str, score: float) -> None:
    assert compute_flexible_score("gsm8k_flexible", response, "1200") == score


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("#### -7", "-7"),
        ("#### $7", "7"),
        ("#### -$7", "-7"),
        ("#### $-7", "-7"),
        ("#### .5", ".5"),
        ("#### 7.", "7."),  # as it stands
        ("#### --7", None),
        ("#### -$-7", None),
        ("#### $$7", None),
        ("#### -", None),
        ("#### ,", None),
        ("#### .", None),
        ("#### ...", None),
        ("#### -.,", None),
    ],
)
def test_an_answer_has_a_digit_and_at_most_one_sign(response: str, answer: str | None) -> None:
    assert extract_answer(response) == answer
    assert compute_score("gsm8k", response, "72", format_score=0.1) == (0.0 if answer is None else 0.1)


def test_a_wrong_answer_in_the_right_format_gets_the_format_score_and_no_answer_gets_none() -> None:
    assert compute_score("gsm8k", "#### 7", "72", format_score=0.1) == 0.1
    assert compute_score("gsm8k", "7", "72", format_score=0.1) == 0.0


@pytest.mark.skipif(not DATA.is_dir(), reason="the GSM8K files are not there")
@pytest.mark.parametrize("split", ["train", "test"])
def test_every_reference_solution_scores_one_against_its_own_answer(split: str) -> None:
    lines = (DATA / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
    solutions = [json.loads(line)["answer"] for line in lines]
    assert len(solutions) > 1000
    for solution in solutions:
        ground_truth = solution.rpartition("#### ")[2].replace(",", "")
        assert extract_answer(solution) == ground_truth
        assert compute_score("openai/gsm8k", solution, ground_truth) == 1.0
        assert compute_flexible_score("openai/gsm8k", solution, ground_truth) == 1.0
