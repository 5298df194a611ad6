"""HellaSwag: the letter of the chosen ending, behind the last "####" of a response."""

# ruff: noqa: ARG001 - the signature is the one that all scorers share

import re
from typing import Any

# A letter by itself, perhaps in brackets or bold, or as it stands before the ending: "B. they leave".
_LETTER = re.compile(r"[\s(*\"']*([A-Za-z])(?:[).:]|[\s*\"']*$)", re.MULTILINE)


def compute_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> float:
    """1 if the letter behind the last "####" is that of the ending with the number `ground_truth`, from 0, else 0."""
    _, marker, answer = solution_str.rpartition("####")
    letter = _LETTER.match(answer) if marker else None
    return float(letter is not None and letter[1].upper() == letter_of(int(ground_truth)))


def letter_of(number: int) -> str:
    """A for ending 0, B for ending 1, and so on."""
    return chr(ord("A") + number)
