r"""Scores answers to Geometry3K (Lu et al., 2021): nine tenths for the last \boxed{...}, a tenth for the form."""

# ruff: noqa: ARG001 - the signature is the one that all scorers share

from typing import Any

from rewards.scorers.competition_math import last_boxed
from rewards.scorers.math_equivalence import is_equivalent

FORM_SHARE = 0.1
_THINK = "<think>"


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None
) -> dict[str, float | bool]:
    r"""Scores a response 0.9 if its last \boxed is equivalent to the ground truth, and 0.1 more if it has the form.

    Returns:
        `score`, and the two parts: `acc`, True for a right answer, and `has_form`.
    """
    answer = last_boxed(solution_str)
    is_right = False
    if answer is not None and ground_truth is not None:
        is_right = is_equivalent(_tight(answer), _tight(str(ground_truth)))
    in_form = has_form(solution_str)
    return {"score": (1 - FORM_SHARE) * is_right + FORM_SHARE * in_form, "acc": is_right, "has_form": in_form}


def has_form(text: str) -> bool:
    r"""Returns True for a text that begins with <think>, closes it, and has a \boxed{...} somewhere behind it."""
    if not text.startswith(_THINK):
        return False
    _, end_of_thought, answer = text.removeprefix(_THINK).partition("</think>")
    _, box, content = answer.partition(r"\boxed{")
    return bool(end_of_thought and box and "}" in content)


def _tight(answer: str) -> str:
    r"""Returns an answer without spaces inside and before its braces; the data set writes "2 \sqrt { 221 }"."""
    return " ".join(answer.split()).replace("{ ", "{").replace(" {", "{").replace(" }", "}")
