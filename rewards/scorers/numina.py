r"""Scores NuminaMath in PRIME's form (Cui et al., 2025): the last box, or the words behind "the answer is"."""

# ruff: noqa: ARG001 - the signature is the one that all scorers share

import re
from typing import Any

from rewards.scorers.competition_math import last_boxed
from rewards.scorers.math_equivalence import is_equivalent

_ANSWER = re.compile(r"\banswers?\s*(?::|is\b:?|are\b:?)\s*", re.IGNORECASE)
_END_OF_SENTENCE = re.compile(r"(?<!\.)\.(?=\s|$)|\n")


def compute_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> float:
    """Scores a response 1 if its answer is mathematically equivalent to the ground truth, else 0."""
    answer = extract_answer(solution_str)
    return 0.0 if answer is None or ground_truth is None else float(is_equivalent(answer, str(ground_truth)))


def extract_answer(solution_str: str) -> str | None:
    r"""Finds a response's answer: the last \boxed, else the end of the sentence behind "answer is", else None."""
    if (boxed := last_boxed(solution_str)) is not None:
        return boxed
    *_, rest = _ANSWER.split(solution_str)
    if rest == solution_str:
        return None
    answer = _END_OF_SENTENCE.split(rest, maxsplit=1)[0].strip(" $*")
    return answer.removeprefix(r"\(").removesuffix(r"\)").strip() or None
