r"""MATH (Hendrycks et al., 2021): the content of the response's last \boxed{...}, compared as mathematics.

math-verify decides by symbolic comparison; equality after string normalisation is a second opinion. Either suffices.
Called outside the main thread, math-verify's own time limits (signal alarms) are off.
"""

# ruff: noqa: ARG001 - the signature is the one that all scorers share

import re
import threading
from typing import Any

_MATH_VERIFY_LIMIT_S = 5
_BOX = re.compile(r"\\(?:boxed|fbox)\b\s*")


def compute_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> float:
    r"""1 if the last \boxed or \fbox is equivalent to the ground truth (the content of a box), else 0."""
    answer, truth = last_boxed(solution_str), str(ground_truth)
    if answer is None:
        return 0.0
    is_spelt_alike = bool(normalised := normalise(answer)) and normalised == normalise(truth)
    return float(is_spelt_alike or is_equivalent_by_math_verify(answer, truth))


def last_boxed(text: str) -> str | None:
    r"""The content of the last complete \boxed{...} or \fbox{...}, or None; "\boxed 7" holds what comes up to a "$"."""
    for match in reversed(list(_BOX.finditer(text))):
        rest = text[match.end() :]
        content = _braced(rest) if rest.startswith("{") else re.split(r"[$\n]", rest, maxsplit=1)[0]
        if content is not None and content.strip():
            return content.strip()
    return None


def is_equivalent_by_math_verify(answer: str, truth: str) -> bool:
    """Symbolic comparison; False also where math-verify gives up."""
    # Imported late: it takes a second, and other tasks do without it.
    from math_verify import parse, verify

    limit_s = _MATH_VERIFY_LIMIT_S if threading.current_thread() is threading.main_thread() else None
    parsed_truth, parsed_answer = (parse(f"\\boxed{{{text}}}", parsing_timeout=limit_s) for text in (truth, answer))
    return bool(parsed_truth and parsed_answer and verify(parsed_truth, parsed_answer, timeout_seconds=limit_s))


def _braced(text: str) -> str | None:
    """What stands between the brace that `text` starts with and its partner, or None if that is missing."""
    depth = 0
    for match in re.finditer(r"\\.|[{}]", text, re.DOTALL):
        depth += {"{": 1, "}": -1}.get(match.group(), 0)
        if depth == 0 and match.group() == "}":
            return text[1 : match.start()]
    return None


# Removed or rewritten, in this order, before two answers are compared as strings (the rules of Hendrycks et al.).
_REWRITES = (
    (r"\\!|\\ |\\,|\\;|\\:|~", ""),
    (r"\\[dt]frac", r"\\frac"),
    (r"\\left|\\right", ""),
    (r"\^\{?\\circ\}?", ""),
    (r"\\\$|\$", ""),
    (r"(?<=\S)\\text\{ .*\}$", ""),  # a unit behind a number
    (r"\\text(?:bf|rm|it)?\{([^{}]*)\}", r"\1"),
    (r"\\?%", ""),
    (r"(?<=\d),(?=\d{3}(?!\d))", ""),
    (r"(?<![\d])\.(?=\d)", "0."),
    (r"\s+", ""),
    (r"^[a-zA-Z]{1,2}=", ""),
    (r"\\sqrt(?![{\[])(\\[a-zA-Z]+|.)", r"\\sqrt{\1}"),
    (r"\\frac(\d)(\d)", r"\\frac{\1}{\2}"),
    (r"\\frac(\d)\{", r"\\frac{\1}{"),
    (r"(\\frac\{[^{}]*\})(\d)", r"\1{\2}"),
    (r"^(-?\d+)/(-?\d+)$", r"\\frac{\1}{\2}"),
    (r"^0\.5$", r"\\frac{1}{2}"),
    (r"\.$", ""),
)


def normalise(answer: str) -> str:
    """One spelling for answers that differ only in typesetting, units or spaces."""
    for pattern, replacement in _REWRITES:
        answer = re.sub(pattern, replacement, answer)
    return answer
