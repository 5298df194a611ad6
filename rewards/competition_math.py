r"""MATH (Hendrycks et al., 2021): the content of the response's last \boxed{...}, compared as mathematics."""

# ruff: noqa: ARG001 - the signature is the one that all scorers share

import re
from typing import Any

from rewards.math_equivalence import is_equivalent

_BOX = re.compile(r"\\(?:boxed|fbox)\b\s*")


def compute_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> float:
    r"""1 if the last \boxed or \fbox is equivalent to the ground truth (the content of a box), else 0."""
    answer = last_boxed(solution_str)
    return 0.0 if answer is None else float(is_equivalent(answer, str(ground_truth)))


def last_boxed(text: str) -> str | None:
    r"""The content of the last complete \boxed{...} or \fbox{...}, or None; "\boxed 7" holds what comes up to a "$"."""
    for match in reversed(list(_BOX.finditer(text))):
        rest = text[match.end() :]
        content = _braced(rest) if rest.startswith("{") else re.split(r"[$\n]", rest, maxsplit=1)[0]
        if content is not None and content.strip():
            return content.strip()
    return None


def _braced(text: str) -> str | None:
    """What stands between the brace that `text` starts with and its partner, or None if that is missing."""
    depth = 0
    for match in re.finditer(r"\\.|[{}]", text, re.DOTALL):
        depth += {"{": 1, "}": -1}.get(match.group(), 0)
        if depth == 0 and match.group() == "}":
            return text[1 : match.start()]
    return None
