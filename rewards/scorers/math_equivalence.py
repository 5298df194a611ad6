r"""Compares two mathematical answers, as they stand in a \boxed{...}.

Two answers are equal if one of two comparisons says so: by strings after normalisation, or symbolically by math-verify.
Checks for differences that both would miss come first. The symbolic comparison is made only for answers that leave no
calculation to be done (rewards/scorers/work_left.py). Units are not compared. Outside the main thread math-verify's own
time limits (signal alarms) are off.
"""

import logging
import re
import threading
from collections.abc import Callable
from decimal import Decimal
from itertools import accumulate

from rewards.scorers.math_values import are_small, is_same
from rewards.scorers.math_writing import rewritten
from rewards.scorers.symbolic import within_budget
from rewards.scorers.work_left import UNIT_AS_TEXT, is_name, leaves_work, parsed, plain_latex

_MATH_VERIFY_LIMIT_S = 5  # for each of three calls
_MAX_CHARACTERS = 1000  # in an answer; twice the length of the truth, if that is more
_MAX_SYMBOLIC_CHARACTERS = 1000  # for longer texts sympy takes seconds; the longest answer of MATH has 159
_MAX_DEPTH = 40  # of brackets; the parser takes seconds for hundreds
_MAX_FACTORS = 3  # small letters in a row; more are a word

# math-verify logs each comparison that it gives up on.
logging.getLogger("math_verify").setLevel(logging.ERROR)


def is_equivalent(answer: str, truth: str) -> bool:
    """Returns True if two answers have the same mathematical value; False also if the comparison takes too long.

    If only one of them is an equation, as in "x = 5", its value is compared.
    """
    if len(answer) > max(_MAX_CHARACTERS, 2 * len(truth)):
        return False
    answer, truth = (_MIXED_NUMBER.sub(r"\1\\frac{\2}{\3}", rewritten(text)) for text in (answer, truth))
    if _differ_in_kind(answer, truth):
        return False
    first = _number(answer)
    second = _number(truth)
    if first and second:
        return Decimal(first) == Decimal(second)
    return is_spelt_alike(answer, truth) or is_equivalent_by_math_verify(answer, truth)


def is_spelt_alike(answer: str, truth: str) -> bool:
    """Returns True if both answers normalise to the same string, not empty; "x=5" equals "5", but not "y=5"."""
    answer = normalise(answer)
    truth = normalise(truth)
    if ("=" in answer) != ("=" in truth):
        answer, truth = (re.sub(r"^[a-zA-Z]{1,2}=", "", text) for text in (answer, truth))
    return bool(answer) and answer == truth


@within_budget(_MATH_VERIFY_LIMIT_S)
def is_equivalent_by_math_verify(answer: str, truth: str) -> bool:
    """Returns True if math-verify finds two answers equal; False also if math-verify gives up."""
    if max(len(answer), len(truth)) > _MAX_SYMBOLIC_CHARACTERS or max(map(_depth, (answer, truth))) > _MAX_DEPTH:
        return False
    limit_s = _MATH_VERIFY_LIMIT_S if threading.current_thread() is threading.main_thread() else None
    answer, truth = (plain_latex(_number(text) or text) for text in (answer, truth))
    parsed_truth, parsed_answer = (parsed(text, limit_s) for text in (truth, answer))
    if not (parsed_truth and parsed_answer and are_small(parsed_truth) and are_small(parsed_answer)):
        return False
    if leaves_work(answer, truth, limit_s):
        return False
    try:
        return any(is_same(first, second, limit_s) for first in parsed_truth for second in parsed_answer)
    except Exception:  # noqa: BLE001 - sympy raises many kinds if parts do not fit together
        return False


def _depth(text: str) -> int:
    """Returns how deep the brackets of a text are nested, at least."""
    return max(accumulate((mark in "([{") - (mark in ")]}") for mark in text), default=0)


def _number(text: str) -> str | None:
    """Returns an answer's plain number without unit and commas, or None; math-verify would read "1, 000" as a list."""
    plain = normalise(text)
    return plain if "%" not in text and re.fullmatch(r"-?[0-9]+(?:\.[0-9]+)?", plain) else None


_MIXED_NUMBER = re.compile(r"(?<![\d.])(\d+)\s+(\d+)/(\d+)")

# Both comparisons miss these differences. Each pattern has one group, which must be the same if both answers have it.
_BASE = re.compile(r"^-?[\dA-Z.]+_\{?(\d+)\}?$")
# Two signs in a row, degrees that go on as minutes, and a number that goes on in dots.
_UNSETTLED = re.compile(r"-[\s({]*-|\\circ\}?\s*\d|(?:\.\.\.|\\[lcd]?dots)\s*$")
_HALF_OF_DAY = re.compile(r"(?<![\\a-z])([ap])\.?m\.?(?![a-z])", re.IGNORECASE)
_BRACKET = re.compile(r"^(?!.*\\cup)(\(|\\\{).*(?:\)|\\\})$")
_LETTERS = re.compile(r"^([A-Za-z]+)$")


def _differ_in_kind(answer: str, truth: str) -> bool:
    """Returns True if two answers differ in number base, a.m. or p.m., brackets or letters, or only one is an equation.

    A base that only one of them names is a difference, and so is an answer that is no settled value if the truth
    is one. An equation that names a value, as "x = 5", does not count.
    """
    plain = normalise(answer), normalise(truth)
    if bool(_BASE.search(plain[0])) is not bool(_BASE.search(plain[1])):
        return True
    if _UNSETTLED.search(answer) and not _UNSETTLED.search(truth):
        return True
    for pattern, texts in ((_BASE, plain), (_HALF_OF_DAY, (answer, truth)), (_BRACKET, plain), (_LETTERS, plain)):
        first, second = (match and match.group(1) for match in map(pattern.search, texts))
        if first and second and not _is_same_word(first, second):
            return True
    left_sides = [text.partition("=")[0] for text in plain if "=" in text]
    return len(left_sides) == 1 and not is_name(left_sides[0])


def _is_same_word(first: str, second: str) -> bool:
    """Returns True if two words from answers are equal; case counts only in single letters.

    Up to three small letters may be a product: "xy" is "yx", but "ACB" is not "ABC".
    """
    if first.islower() and second.islower() and len(first) == len(second) <= _MAX_FACTORS:
        return sorted(first) == sorted(second)
    return first == second or (len(first) > 1 and first.lower() == second.lower())


def _without_thousands(match: re.Match[str]) -> str:
    """Removes the commas between thousands from a matched number; commas in brackets, as in a point or a set, stay."""
    return match[0] if match[2] else re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", match[0])


# Removed or rewritten, in this order, before answers are compared as strings: the rules of Hendrycks et al., and more.
_REWRITES: tuple[tuple[str, str | Callable[[re.Match[str]], str]], ...] = (
    (r"\\!", ""),
    (r"(?<!\\)\\[ ,;:]|~", " "),  # "\\ " ends a row
    (r"\\mbox\b", r"\\text"),
    (r"\\[dt]frac", r"\\frac"),
    (r"\\left(?![a-z])|\\right(?![a-z])", ""),
    (r"\^\{?\\circ\}?+(?!\s*\d)", ""),
    (r"\\\$|\$", ""),
    (r"\.\s*$", ""),
    (UNIT_AS_TEXT, ""),
    (r"\\text(?:bf|rm|it)?\{([^{}]*)\}", r"\1"),
    (r"(?<=[\d.})])\s*\\?%(?!\s*[\w\\({])", ""),
    (r"(?<=\d)\{,\}(?=\d)", ","),
    (r"(?<![\d])\.(?=\d)", "0."),
    (r"(?<!\d)\s+|\s+(?!\d)|(?<=\d)\s+(?=\d{3}(?!\d))", ""),  # "1 2" is not 12, and "1 000" is 1000
    (r"((?:[^()\[\]\\]|\\(?!\}))++)([)\]]|\\\})?", _without_thousands),
    (r"\\sqrt(?![{\[])(\\[a-zA-Z]+|.)", r"\\sqrt{\1}"),
    (r"\\frac(\d)(\d)", r"\\frac{\1}{\2}"),
    (r"\\frac(\d)\{", r"\\frac{\1}{"),
    (r"(\\frac\{[^{}]*\})(\d)", r"\1{\2}"),
    (r"^(-?\d+)/(-?\d+)$", r"\\frac{\1}{\2}"),
)


def normalise(answer: str) -> str:
    """Rewrites an answer so that answers which differ only in typesetting, units or spaces become the same text."""
    for pattern, replacement in _REWRITES:
        answer = re.sub(pattern, replacement, answer)
    return answer
