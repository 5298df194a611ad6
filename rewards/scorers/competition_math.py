r"""Scores answers to MATH (Hendrycks et al., 2021): the content of the last \boxed{...}, compared as mathematics."""

# ruff: noqa: ARG001 - the signature is the one that all scorers share

import re
from typing import Any

from rewards.scorers.math_equivalence import is_equivalent

# Backslashes with the box or brace behind them, or a brace.
_BOX_OR_BRACE = re.compile(r"(\\++)(?:((?:boxed|fbox)\b\s*+)(\{)?|[{}])?|[{}]")
_REST_OF_LINE = re.compile(r"[^$\n]*")  # what a box without a brace holds
_NOT_EMPTY = re.compile(r"\s*+\S")


def compute_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> float:
    r"""Scores a response 1 if its last \boxed or \fbox is equivalent to the ground truth, else 0."""
    answer = last_boxed(solution_str)
    return 0.0 if answer is None or ground_truth is None else float(is_equivalent(answer, str(ground_truth)))


def last_boxed(text: str) -> str | None:
    r"""Returns the content of the last complete \boxed{...} or \fbox{...} in a text; None if there is no box.

    A box without braces, as in "\boxed 7", ends at a "$" or at the end of its line.
    """
    last = end_of_last = end_of_line = -1
    opened: list[int] = []  # for every open brace the start of its content, or -1 if the brace opens no box
    for match in _BOX_OR_BRACE.finditer(text):
        backslashes, box, brace = match.groups(default="")
        start = -1
        end = match.end() - 1
        if not box and len(backslashes) % 2:
            continue  # an escaped brace opens and closes nothing
        if box and not brace:
            start = match.end()
            if start > end_of_line:
                end_of_line = next(_REST_OF_LINE.finditer(text, start)).end()
            end = end_of_line
        elif match.group().endswith("{"):
            opened.append(match.end() if box else -1)
        elif match.group().endswith("}") and opened:
            start = opened.pop()
        if start > last and _NOT_EMPTY.match(text, start, end):
            last = start
            end_of_last = end
    return text[last:end_of_last].strip() or None
