"""Scores answers to HellaSwag: the letter of the chosen ending, behind the last "####" of a response."""

# ruff: noqa: ARG001 - the signature is the one that all scorers share

import re
from typing import Any

# A letter by itself, also in brackets or bold, or before the text of the ending: "B. they leave".
_LETTER = re.compile(r"[\s(*\"']*([A-Za-z])(?:[).:]|[\s*\"']*$)", re.MULTILINE)


def compute_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> float:
    """Scores a response 1 if its letter behind the last "####" is that of ending `ground_truth` (from 0), else 0."""
    _, marker, answer = solution_str.rpartition("####")
    letter = _LETTER.match(answer) if marker else None
    return float(letter is not None and letter[1].upper() == letter_of(int(ground_truth)))


def letter_of(number: int) -> str:
    """Returns the letter of a HellaSwag ending: A for number 0, B for number 1, and so on."""
    return chr(ord("A") + number)
