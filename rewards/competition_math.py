r"""MATH (Hendrycks et al., 2021): the content of the response's last \boxed{...}, compared as mathematics."""

# ruff: noqa: ARG001 - the signature is the one that all scorers share

import re
from typing import Any

from rewards.math_equivalence import is_equivalent

# A box with its brace, or without one what follows in its line; an escaped character, which is no brace; a brace.
_BOX_OR_BRACE = re.compile(r"\\+(?:boxed|fbox)\b\s*(?:(\{)|(?=([^$\n]*)))|\\.|[{}]", re.DOTALL)


def compute_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> float:
    r"""1 if the last \boxed or \fbox is equivalent to the ground truth (the content of a box), else 0."""
    answer = last_boxed(solution_str)
    return 0.0 if answer is None else float(is_equivalent(answer, str(ground_truth)))


def last_boxed(text: str) -> str | None:
    r"""The content of the last complete \boxed{...} or \fbox{...}, or None; "\boxed 7" holds what comes up to a "$"."""
    last, content = -1, None
    opened: list[int] = []  # of every open brace, where its content begins; of one that opens no box, -1
    for match in _BOX_OR_BRACE.finditer(text):
        start, end = -1, match.start()
        if match.group() == "}":
            start = opened.pop() if opened else -1
        elif match.group(1) or match.group() == "{":
            opened.append(match.end() if match.group(1) else -1)
        elif match.group(2):
            start, end = match.span(2)
        if start > last and (inside := text[start:end].strip()):
            last, content = start, inside
    return content
