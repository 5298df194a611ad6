r"""The comparison of two answers, as they stand in a \boxed{...}, as mathematics.

Two opinions, either of which suffices: math-verify compares symbolically, and strings are compared after
normalisation. Before them stand distinctions that both would miss; the symbolic one is asked only about answers that
leave no work (rewards/scorers/work_left.py). Units are not compared.
Called outside the main thread, math-verify's own time limits (signal alarms) are off.
"""

import logging
import re
import threading
from collections.abc import Callable
from decimal import Decimal

from math_verify import verify

from rewards.scorers.symbolic import within_budget
from rewards.scorers.work_left import UNIT_POWER, UNIT_WORD, is_name, leaves_work, parsed, plain_latex

_MATH_VERIFY_LIMIT_S = 5  # of each of three calls
_MAX_CHARACTERS = 1000  # of an answer, where the truth is no longer
_MAX_SYMBOLIC_CHARACTERS = 1000  # sympy takes seconds for more; the longest answer of MATH has 159
_MAX_FACTORS = 3  # small letters in a row; more are a word
_DECIMAL_PLACES = 12  # at which a decimal number equals a fraction or a root; with math-verify's 6 it would equal pi

# What math-verify gives up on is not equal, and no news: it would name such answers on the console.
logging.getLogger("math_verify").setLevel(logging.ERROR)


def is_equivalent(answer: str, truth: str) -> bool:
    """Returns True if `answer` is `truth` in any spelling; False also where that cannot be found out in time.

    Where one of them is an equation "x = 5" and the other is none, its value counts.
    """
    if len(answer) > max(_MAX_CHARACTERS, 2 * len(truth)):
        return False
    answer, truth = (_MIXED_NUMBER.sub(r"\1\\frac{\2}{\3}", text) for text in (answer, truth))
    first, second = _number(answer), _number(truth)
    if first and second:
        return Decimal(first) == Decimal(second)
    if _differ_in_kind(answer, truth):
        return False
    return is_spelt_alike(answer, truth) or is_equivalent_by_math_verify(answer, truth)


def is_spelt_alike(answer: str, truth: str) -> bool:
    """Returns True if both normalise to one string that is not empty; "x=5" and "5" do, "x=5" and "y=5" do not."""
    answer, truth = normalise(answer), normalise(truth)
    if ("=" in answer) != ("=" in truth):
        answer, truth = (re.sub(r"^[a-zA-Z]{1,2}=", "", text) for text in (answer, truth))
    return bool(answer) and answer == truth


@within_budget(_MATH_VERIFY_LIMIT_S)
def is_equivalent_by_math_verify(answer: str, truth: str) -> bool:
    """Symbolic comparison; False also where math-verify gives up."""
    if max(len(answer), len(truth)) > _MAX_SYMBOLIC_CHARACTERS:
        return False
    limit_s = _MATH_VERIFY_LIMIT_S if threading.current_thread() is threading.main_thread() else None
    answer, truth = (plain_latex(_number(text) or text) for text in (answer, truth))
    if leaves_work(answer, truth, limit_s):
        return False
    parsed_truth, parsed_answer = (parsed(text, limit_s) for text in (truth, answer))
    if not (parsed_truth and parsed_answer):
        return False
    return bool(
        verify(
            parsed_truth,
            parsed_answer,
            float_rounding=_DECIMAL_PLACES,
            allow_set_relation_comp=True,  # an interval and the inequality that describes it are the same set
            timeout_seconds=limit_s,
        )
    )


def _number(text: str) -> str | None:
    """A plain number without unit and commas, or None; to math-verify "1, 000" would be a list."""
    plain = normalise(text)
    return plain if "%" not in text and re.fullmatch(r"-?[0-9]+(?:\.[0-9]+)?", plain) else None


_MIXED_NUMBER = re.compile(r"(?<![\d.])(\d+)\s+(\d+)/(\d+)")

# Both opinions overlook these, so they are compared first: one group each, the same where both answers have it.
_BASE = re.compile(r"^-?[\dA-Z.]+_\{?(\d+)\}?$")
_HALF_OF_DAY = re.compile(r"(?<![\\a-z])([ap])\.?m\.?(?![a-z])", re.IGNORECASE)
_BRACKET = re.compile(r"^(?!.*\\cup)(\(|\\\{).*(?:\)|\\\})$")
_LETTERS = re.compile(r"^([A-Za-z]+)$")


def _differ_in_kind(answer: str, truth: str) -> bool:
    """Returns True if base, half of the day, brackets or letters differ, or only one is an equation without a value."""
    plain = normalise(answer), normalise(truth)
    for pattern, texts in ((_BASE, plain), (_HALF_OF_DAY, (answer, truth)), (_BRACKET, plain), (_LETTERS, plain)):
        first, second = (match and match.group(1) for match in map(pattern.search, texts))
        if first and second and not _is_same_word(first, second):
            return True
    left_sides = [text.partition("=")[0] for text in plain if "=" in text]
    return len(left_sides) == 1 and not is_name(left_sides[0])


def _is_same_word(first: str, second: str) -> bool:
    """Case counts only in single letters; "xy" and "yx" may be the same product, "ACB" and "ABC" are not."""
    if first.islower() and second.islower() and len(first) == len(second) <= _MAX_FACTORS:
        return sorted(first) == sorted(second)
    return first == second or (len(first) > 1 and first.lower() == second.lower())


def _without_thousands(match: re.Match[str]) -> str:
    """Without the commas of thousands; those before a closing bracket stay: they are of a point or a set."""
    return match[0] if match[2] else re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", match[0])


# Removed or rewritten, in this order, before answers are compared as strings: the rules of Hendrycks et al., and more.
_REWRITES: tuple[tuple[str, str | Callable[[re.Match[str]], str]], ...] = (
    (r"\\!", ""),
    (r"(?<!\\)\\[ ,;:]|~", " "),  # "\\ " ends a row
    (r"\\mbox\b", r"\\text"),
    (r"\\[dt]frac", r"\\frac"),
    (r"\\left(?![a-z])|\\right(?![a-z])", ""),
    (r"\^\{?\\circ\}?", ""),
    (r"\\\$|\$", ""),
    (r"\.\s*$", ""),
    (rf"(?<=\S)\\text\{{ \s*+{UNIT_WORD}[^{{}}\d]*\}}{UNIT_POWER}$", ""),  # a unit behind a number
    (r"\\text(?:bf|rm|it)?\{([^{}]*)\}", r"\1"),
    (r"\\?%", ""),
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
    """One spelling for answers that differ only in typesetting, units or spaces."""
    for pattern, replacement in _REWRITES:
        answer = re.sub(pattern, replacement, answer)
    return answer
