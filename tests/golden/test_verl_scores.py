"""Scores of the other rules of verl, worked by hand from verl's code."""

from __future__ import annotations

import pytest

from rewards.registry import load_scorer
from rewards.scorers import exact_match, geo3k, math_dapo, numina

pytestmark = pytest.mark.promise("scorers")


@pytest.mark.parametrize(
    ("response", "truth", "is_right", "pred"),
    [
        ("So it is 34.\n\nAnswer: 34", "34", True, "34"),
        ("answer :34", "34", True, "34"),
        ("Answer:\n34", "34", True, "34"),
        ("Answer: $34$", "34", True, "34"),
        ("Answer: it is $34$ cookies", "34", True, "34"),
        (r"Answer: \boxed{34}", "34", True, "34"),
        ("Answer: x = 34", "34", True, "34"),
        ("Answer: 1,234", "1234", True, "1234"),
        ("Answer: 34 degrees", "34", True, "34"),
        (r"Answer: 34\text{ cm}", "34", True, "34"),
        (r"Answer: \frac12", r"\frac{1}{2}", True, r"\frac{1}{2}"),
        (r"Answer: \sqrt2", r"\sqrt{2}", True, r"\sqrt{2}"),
        ("Answer: 34", 34, True, "34"),
        ("Answer: 1\nAnswer: 34", "34", True, "34"),
        ("Answer: 34\nAnswer: 35", "34", False, "35"),
        ("Answer: 1. Answer: 34", "34", False, "1.Answer:34"),
        ("Answer: 34.", "34", False, "34."),
        ("Answer: 34.0", "34", False, "34.0"),
        (r"Answer: \frac{2}{4}", r"\frac{1}{2}", False, r"\frac{2}{4}"),
        (r"\boxed{34}", "34", False, "[INVALID]"),
        ("the answer is 34", "34", False, "[INVALID]"),
        ("Answer: 34" + " padding" * 50, "34", False, "[INVALID]"),
        ("", "34", False, "[INVALID]"),
    ],
)
def test_dapo_gives_one_or_minus_one_and_says_what_the_answer_was(
    response: str, truth: object, is_right: bool, pred: str
) -> None:
    scored = math_dapo.compute_score("math_dapo", response, truth)
    assert scored == {"score": 1.0 if is_right else -1.0, "acc": is_right, "pred": pred}


@pytest.mark.parametrize(
    ("response", "is_right", "pred"),
    [
        (r"So it is \boxed{34}.", True, "34"),
        (r"So it is \boxed{35}.", False, "35"),
        (r"\boxed{35} or \boxed{34}", True, "34"),
        (r"\boxed{34 }", False, "34 "),
        (r"\boxed{\frac{68}{2}}", False, r"\frac{68}{2}"),
        (r"\boxed{35} Answer: 34", True, "34"),
        (r"Answer: 35 \boxed{34}", False, "3534"),
        (r"Answer: \boxed{34}", True, "34"),
        (r"\boxed{34}" + " and so on" * 10, False, "[INVALID]"),
        (r"\boxed{34} \boxed{3", False, "[INVALID]"),
        (r"\boxed 34", False, "[INVALID]"),
        ("34", False, "[INVALID]"),
    ],
)
def test_dapo_of_verl_after_0_9_takes_the_last_box_where_no_answer_is_marked(
    response: str, is_right: bool, pred: str
) -> None:
    scored = math_dapo.compute_boxed_score("math_dapo", response, "34")
    assert scored == {"score": 1.0 if is_right else -1.0, "acc": is_right, "pred": pred}
    assert load_scorer("math_dapo_boxed").function is math_dapo.compute_boxed_score


@pytest.mark.parametrize(
    ("response", "targets", "score"),
    [
        ("<think>...</think> <answer> Beijing </answer>", ["Beijing"], 1.0),
        ("<answer>The Beatles!</answer>", ["beatles"], 1.0),
        ("<answer>Rome</answer>", ["Paris", "Rome"], 1.0),
        ("<answer>Rome</answer>", "Rome", 1.0),
        ("<answer>Paris</answer> no <answer>Rome</answer>", ["Rome"], 1.0),
        ("<answer>Rome\n</answer>", ["Rome"], 1.0),
        ("<answer>A</answer>", ["A"], 1.0),
        ("<answer>Rome</answer> no <answer>Paris</answer>", ["Rome"], 0.0),
        ("<answer>Rome, Italy</answer>", ["Rome"], 0.0),
        ("<answer></answer>", ["the"], 0.0),
        ("<answer>Rome", ["Rome"], 0.0),
        ("Rome", ["Rome"], 0.0),
        ("", ["Rome"], 0.0),
        ("<answer>Rome</answer>" * 10, ["Rome"], 1.0),
        ("<answer>Rome</answer>" * 11, ["Rome"], 0.25),
    ],
)
def test_exact_match_compares_words(response: str, targets: object, score: float) -> None:
    assert exact_match.compute_score("searchR1_nq", response, {"target": targets}) == score


@pytest.mark.parametrize("truth", ["Rome", {}, {"target": []}, {"target": [1]}, None])
def test_exact_match_says_which_ground_truth_it_needs(truth: object) -> None:
    with pytest.raises(ValueError, match=r"expected a ground_truth \{'target': text or list of texts\}, got "):
        exact_match.compute_score("searchR1_nq", "<answer>Rome</answer>", truth)


@pytest.mark.parametrize(
    ("response", "truth", "score"),
    [
        (r"Step 2: \boxed{\frac{1}{2}}", "0.5", 1.0),
        (r"The answer is 3. Checked: \boxed{4}", "4", 1.0),
        ("Hence the answer is $x = 4$.", "4", 1.0),
        ("Hence the answer is: 3.5 and no more", "3.5", 0.0),
        ("The answer is 3.5. It is exact.", "3.5", 1.0),
        ("Answer: 4\nDone", "4", 1.0),
        ("The answer is 0.333...", r"\frac13", 1.0),
        ("The answer is 60°.", "60", 1.0),
        ("The answer is 5 tenths.", "5", 0.0),
        ("The answer is 3. No, the answer is **4**.", "4", 1.0),
        (r"The answers are \(2\)", "2", 1.0),
        ("The answer is 5}{7", "5", 0.0),  # a brace ends nothing there
        ("The answer is B", r"\text{B}", 1.0),
        ("The answer is 50", "0.5", 0.0),  # verl: also a hundredth, and a hundred times the truth
        ("The answer is 3.14", r"\pi", 0.0),  # verl: pi may be 3.14
        ("Four, so 4", "4", 0.0),  # verl: what is left of the text
        ("", "4", 0.0),
    ],
)
def test_numina_takes_the_last_box_or_what_the_answer_is(response: str, truth: str, score: float) -> None:
    assert numina.compute_score("numina_olympiads", response, truth) == score


GEO3K_RESPONSE = "<think>The legs are equal.</think> The answer is {}."


@pytest.mark.parametrize(
    ("answer", "truth", "is_right"),
    [
        ("12", "12", True),
        ("12.0", "12", True),
        ("1,200", "1200", True),
        (r"5\sqrt{3}", r"5 \sqrt { 3 }", True),
        (r"\sqrt{75}", r"5 \sqrt { 3 }", True),
        ("8.66", r"5 \sqrt { 3 }", False),
        (r"\frac{25}{2}", "12.5", True),
        (r"2 \frac { 2 } { 9 }", r"\frac{20}{9}", True),
        (r"42^\circ", "42", True),
        (r"37.5\%", "37.5", True),
        ("x = 12", "12", True),
        ("-12", "12", False),
        ("", "12", False),
        # verl refuses these: a fraction that can be reduced, a quotient that is an integer, a name of several letters.
        (r"\frac{50}{4}", r"\frac { 25 } { 2 }", True),
        ("24/2", "12", True),
        (r"m\angle A = 42", "42", True),
    ],
)
def test_geo3k_gives_nine_tenths_for_the_last_box(answer: str, truth: str, is_right: bool) -> None:
    scored = geo3k.compute_score(
        "hiyouga/geometry3k", GEO3K_RESPONSE.format(rf"\boxed{{7}} or \boxed{{{answer}}}"), truth
    )
    assert scored == {"score": pytest.approx(0.9 * is_right + 0.1), "acc": is_right, "has_form": True}


@pytest.mark.parametrize(
    ("response", "score"),
    [
        (r"<think>a</think>\boxed{12}", 1.0),
        ("<think>a\nb</think>\n\nSo\n\\boxed{12}\n", 1.0),
        (r"<think></think><think>a</think> \boxed{12} more", 1.0),
        (r" <think>a</think> \boxed{12}", 0.9),
        (r"<think>a \boxed{12}", 0.9),
        (r"<think>a \boxed{12}</think> 12", 0.9),
        (r"</think>\boxed{12}", 0.9),
        (r"\boxed{12}", 0.9),
        (r"<think>a</think> \boxed{13}", 0.1),
        (r"<think>a</think> 12", 0.0),
        ("12", 0.0),
        ("", 0.0),
    ],
)
def test_geo3k_gives_a_tenth_for_the_form(response: str, score: float) -> None:
    assert geo3k.compute_score("hiyouga/geometry3k", response, "12")["score"] == pytest.approx(score)
