r"""MATH: three spellings of a row, boxes, and real rows whose answers a second file gives independently."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from recipes.competition_math.prepare import to_row
from recipes.rows import BadInput, Example
from rewards.scorers.competition_math import compute_score
from rewards.scorers.math_equivalence import normalise
from tests.support.datasets import data_file

SOLVED = "Half of it is $\\boxed{1}$, so all is $\\boxed{\\frac{1}{2}}$."


@pytest.mark.parametrize(
    "fields",
    [
        {"problem": "How much?", "solution": SOLVED},
        {"question": "How much?", "answer": SOLVED},
        {"problem": "How much?", "answer": "\\frac{1}{2}"},
        {"problem": "How much?", "solution": SOLVED, "answer": "1/2"},
    ],
)
def test_three_spellings_of_a_row_give_one_prompt_and_one_truth(fields: dict[str, str]) -> None:
    row = to_row(Example("here", {**fields, "level": "Level 3", "type": "Algebra"}, "test", 5))
    assert row is not None
    assert row["data_source"] == "DigitalLearningGmbH/MATH-lighteval"
    asked = "How much? Let's think step by step and output the final answer within \\boxed{}."
    assert row["prompt"] == [{"role": "user", "content": asked}]
    assert row["ability"] == "math"
    assert row["reward_model"] == {"style": "rule", "ground_truth": "\\frac{1}{2}"}
    info = row["extra_info"]
    assert (info["split"], info["index"], info["level"], info["subject"]) == ("test", 5, "Level 3", "Algebra")
    assert compute_score(row["data_source"], SOLVED, row["reward_model"]["ground_truth"]) == 1.0


@pytest.mark.parametrize("fields", [{"solution": "it is 2"}, {"solution": "\\boxed{2"}, {"answer": "so \\boxed{2"}])
def test_a_solution_without_a_complete_box_is_refused(fields: dict[str, str]) -> None:
    with pytest.raises(BadInput, match=r"here: the solution has no complete \\boxed"):
        to_row(Example("here", {"problem": "How much?", **fields}))


def test_a_row_with_an_empty_answer_is_left_out() -> None:
    assert to_row(Example("here", {"problem": "How much?", "answer": " "})) is None


@pytest.mark.slow
def test_the_real_rows(prepare_real: Callable[..., Any], check_schema: Callable[[Any], None]) -> None:
    splits = prepare_real("competition_math")
    check_schema(splits)
    assert {name: len(rows) for name, rows in splits.items()} == {"train": 7498, "test": 5000}  # two have no answer
    truths = {name: [row["reward_model"]["ground_truth"] for row in rows] for name, rows in splits.items()}
    # Read from the solutions by eye.
    assert truths["train"][:2] == ["16", "180\\text{ miles}"]
    by_eye = {0: "2", 1: "10", 2: "\\dfrac{9}{7}", 10: "\\frac{x+2}{7}", 2500: "\\frac{1}{2}"}
    assert {row: truths["test"][row] for row in by_eye} == by_eye

    by_problem = {row["extra_info"]["question"]: row["reward_model"]["ground_truth"] for row in splits["test"]}
    lines = data_file("math/validation_answers_only.jsonl").read_text().splitlines()
    others = {row["problem"]: row["answer"] for row in map(json.loads, lines)}
    assert by_problem.keys() == others.keys()
    differing = [key for key, truth in by_problem.items() if normalise(truth) != normalise(others[key])]
    # That file has half a sentence in place of one answer.
    assert [by_problem[key] for key in differing] == ["12"]
