"""Scores answers to GSM8K: the last number of a response, compared with the reference answer as a string."""

# ruff: noqa: ARG001 - the signature is the one that all scorers share

import re
from typing import Any, Literal

from rewards.scorers.math_writing import SCALES

Method = Literal["strict", "flexible"]

# An answer stands at the end; looking at no more keeps the search cheap on long responses.
_TAIL_CHARACTERS = 300
# At most one minus and one dollar sign, in either order; at least one digit.
_SIGNED = r"(?:-\$?|\$-?)?(?=[.,]*[0-9])[0-9.,]++(?:[eE][-+]?[0-9]++)?"
# A number that continues as an expression, a list, with a smaller unit or in words is another number: "1/2" is not 1.
_CHANGE = (
    rf"(?i:k\b| ?(?:{SCALES})\b)| ?(?:[KMBTxyz]|half|halves|thirds?|squared|cubed|doubled|tripled|halved|factorial)\b"
    r"|[ -]and[ -](?:a|one)[ -](?:half|third|quarter)\b"
)
_BLANK = r"[ \t]"
_SIGN = (
    r"(?:[-=]>|\*\*|[-+*/^=x×÷·;~|&%<>≤≥≈→]|\\(?:times|cdot|div|pm|to|bmod|over)\b|(?<=,)"
    r"|(?:or|and|to|times|plus|minus|less|over|mod|modulo|(?:multiplied|divided) by)\b)"
)
_IN_BRACKETS = rf"\({_SIGNED}\)|\{{{_SIGNED}\}}"
_LARGER_UNIT = (
    r"(?:feet|foot|ft|yards?|meters?|miles?|pounds?|lbs?|gallons?|dollars?|(?:hour|minute|day|week|month|year)s?)"
)
_FURTHER = (
    rf"{_BLANK}*+{_SIGN}{_BLANK}*+(?:{_SIGNED}|{_IN_BRACKETS})|:{_SIGNED}|\({_SIGNED}\)"
    rf"|{_BLANK}++(?:{_LARGER_UNIT}{_BLANK}++(?:and{_BLANK}++)?)?{_SIGNED}(?:/[0-9]++)?"
)
_MARKED_NUMBER = re.compile(rf"#### ({_SIGNED}(?:{_FURTHER}|{_CHANGE})*)")
_NUMBER = re.compile(
    rf"\\[dt]?frac\{{?-?[0-9]+\}}?\{{?[0-9]+\}}?"
    rf"|-?\$?(?:[0-9][0-9,]*(?:\.[0-9]+)?(?:{_BLANK}?/{_BLANK}?[0-9]+)?|\.[0-9]+)(?:{_CHANGE})?"
)


def extract_answer(solution_str: str, method: Method = "strict") -> str | None:
    """Finds the answer in the last 300 characters of a response, without commas and dollar signs; None if missing.

    The answer is the last number, or expression of numbers, behind "#### " (strict), or the last number (flexible).
    """
    pattern = _MARKED_NUMBER if method == "strict" else _NUMBER
    numbers = pattern.findall(solution_str[-_TAIL_CHARACTERS:].replace("\N{MINUS SIGN}", "-"))
    return _plain(numbers[-1]) if numbers else None


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Any = None,
    *,
    method: Method = "strict",
    format_score: float = 0.0,
) -> float:
    """Scores a response 1 for the right number, `format_score` for a wrong number, 0 if it has no number."""
    answer = extract_answer(solution_str, method)
    if answer is None:
        return 0.0
    return 1.0 if answer == _plain(str(ground_truth)) else format_score


def compute_flexible_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> float:
    """Scores a response 1 if its last number is the right answer, with or without "####" before it, else 0."""
    return compute_score(data_source, solution_str, ground_truth, extra_info, method="flexible")


def _plain(number: str) -> str:
    return re.sub(r"[,$]|(?<![0-9])\s|\s(?![0-9])", "", number)
