r"""The MATH scorer: boxes, both comparisons, and answers that must not take long."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from rewards.scorers.competition_math import compute_score, last_boxed
from rewards.scorers.math_equivalence import is_equivalent_by_math_verify, is_spelt_alike, normalise


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
        (r"\\\boxed{7} behind a line break", "7"),
        (r"\\boxed{7} escaped twice", "7"),
        (r"\boxed{7} } } { \boxed{", "7"),
        (r"\boxed{" * 20_000, None),
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
        (r"10\text{ cm}", "10"),
        (r"7\text{ hours}.", "7"),
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
    ("answer", "truth", "is_alike"),
    [("x=5", "5", True), ("5", "x=5", True), ("x=5", "x = 5", True), ("x=5", "y=5", False), (r"\%", "", False)],
)
def test_a_name_counts_where_both_have_one(answer: str, truth: str, is_alike: bool) -> None:
    assert is_spelt_alike(answer, truth) is is_alike


def test_math_verify_is_an_opinion_of_its_own() -> None:
    assert is_equivalent_by_math_verify(r"\frac{2}{4}", r"\frac{1}{2}")
    assert not is_equivalent_by_math_verify("3", "4")


@pytest.mark.parametrize(
    "answer",
    [
        "+".join(f"x^{{{power}}}" for power in range(300)),
        "(" * 2000 + "1" + ")" * 2000,
        r"\text{" + "word " * 5000 + "}",
        "1,000" * 5000,
    ],
    ids=["polynomial", "parentheses", "words", "commas"],
)
def test_an_answer_that_is_too_long_for_symbolic_comparison_is_only_compared_as_a_string(answer: str) -> None:
    assert compute_score("lighteval/MATH", rf"\boxed{{{answer}}}", r"\frac{1}{2}") == 0.0
    assert compute_score("lighteval/MATH", rf"\boxed{{{answer}}}", answer) == 1.0


@pytest.mark.extended
@pytest.mark.parametrize("answer", [r"10^{10^{10}}", "100000000!", r"\sum_{k=1}^{1000000000}\frac1k", "(x+1)^{100000}"])
def test_what_cannot_be_computed_is_not_equal(answer: str) -> None:
    assert compute_score("lighteval/MATH", rf"\boxed{{{answer}}}", r"\frac{1}{2}") == 0.0


def test_it_works_off_the_main_thread_too() -> None:
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(compute_score, "lighteval/MATH", r"\boxed{\frac{2}{4}}", r"\frac12").result() == 1.0
