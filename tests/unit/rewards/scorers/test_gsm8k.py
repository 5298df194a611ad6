"""The GSM8K scorer: which part of a response is the answer, and the solutions of the data set."""

from __future__ import annotations

import json

import pytest

from rewards.scorers.gsm8k import compute_flexible_score, compute_score, extract_answer
from tests.support.datasets import data_file


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("#### -7", "-7"),
        ("#### $7", "7"),
        ("#### -$7", "-7"),
        ("#### $-7", "-7"),
        ("#### .5", ".5"),
        ("#### 7.", "7."),  # as it stands
        ("#### 144 / 2", "144/2"),
        ("#### 5 1/2", "5 1/2"),
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


@pytest.mark.parametrize("split", ["train", "test"])
def test_every_reference_solution_scores_one_against_its_own_answer(split: str) -> None:
    lines = data_file(f"gsm8k/{split}.jsonl").read_text(encoding="utf-8").splitlines()
    solutions = [json.loads(line)["answer"] for line in lines]
    assert len(solutions) > 1000
    for solution in solutions:
        ground_truth = solution.rpartition("#### ")[2].replace(",", "")
        assert extract_answer(solution) == ground_truth
        assert compute_score("openai/gsm8k", solution, ground_truth) == 1.0
        assert compute_flexible_score("openai/gsm8k", solution, ground_truth) == 1.0
