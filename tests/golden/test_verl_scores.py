"""Scores of the other rules of verl, worked by hand from verl's code."""

from __future__ import annotations

import pytest

from rewards.registry import load_scorer
from rewards.scorers import exact_match, math_dapo, numina

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
