r"""The MATH scorer: boxes, both opinions on equality, and the data set's own solutions."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rewards.competition_math import compute_score, is_equivalent_by_math_verify, last_boxed, normalise

DATA = Path(__file__).parents[4] / "shared" / "data" / "math" / "test.jsonl"


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"so $\boxed{2}$", "2"),
        (r"$\boxed{1}$, no, $\boxed{\frac{1}{2}}$.", r"\frac{1}{2}"),
        (r"\fbox{7}", "7"),
        (r"\boxed {7}", "7"),
        (r"$\boxed 7$ it is", "7"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{x \}", None),
        (r"\boxed{3} and then \boxed{4", "3"),
        (r"\boxed{}", None),
        ("seven", None),
        ("", None),
    ],
)
def test_the_last_complete_box_is_found(text: str, content: str | None) -> None:
    assert last_boxed(text) == content


@pytest.mark.parametrize(
    ("answer", "truth"),
    [
        (r"\dfrac{1}{2}", r"\frac12"),
        ("1/2", r"\frac{1}{2}"),
        ("0.5", r"\frac{1}{2}"),
        (r"x=5", "5"),
        (r"10\text{ cm}", "10"),
        (r"\$10", "10"),
        (r"50\%", "50"),
        (r"90^\circ", "90"),
        ("1,000", "1000"),
        (r"\left( 3, 4 \right)", "(3,4)"),
        (r"\sqrt2", r"\sqrt{2}"),
        (r"\text{Evelyn}", r"\text{ Evelyn}"),
        (r".25", "0.25"),
    ],
)
def test_answers_that_differ_in_typesetting_normalise_to_one_string(answer: str, truth: str) -> None:
    assert normalise(answer) == normalise(truth)


@pytest.mark.parametrize(
    ("answer", "truth", "score"),
    [
        (r"\frac{2}{4}", r"\frac{1}{2}", 1.0),
        (r"x^2 + 2x + 1", r"(x+1)^2", 1.0),
        (r"\sqrt{8}", r"2\sqrt{2}", 1.0),
        (r"[0, 1)", r"[0,1)", 1.0),
        (r"3", "4", 0.0),
        (r"(3, 4)", r"(4, 3)", 0.0),
        (r"\text{ Alice}", r"\text{ Evelyn}", 0.0),
        (r"\text{ cm}", r"\%", 0.0),
    ],
)
def test_mathematical_equality_decides(answer: str, truth: str, score: float) -> None:
    assert compute_score("lighteval/MATH", f"hence $\\boxed{{{answer}}}$.", truth) == score


def test_a_response_without_a_box_scores_zero() -> None:
    assert compute_score("math", "the answer is 2", "2") == 0.0


def test_it_works_off_the_main_thread_too() -> None:
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(compute_score, "math", r"\boxed{\frac{2}{4}}", r"\frac12").result() == 1.0


@pytest.mark.skipif(not DATA.is_file(), reason="the MATH file is not there")
def test_reference_solutions_score_one_against_their_own_box_by_either_opinion() -> None:
    rows = [json.loads(line) for line in DATA.read_text(encoding="utf-8").splitlines()]
    for row in rows:
        box = last_boxed(row["answer"])
        assert box is not None
        assert compute_score("math", row["answer"], box) == 1.0
    boxes = [last_boxed(row["answer"]) for row in rows[::50]]
    assert all(is_equivalent_by_math_verify(str(box), str(box)) for box in boxes)
