r"""Scores answers to DAPO's mathematics (Yu et al., 2025): text behind the last "Answer:", compared as in Minerva.

Strings are compared after the normalisation of Lewkowycz et al. (2022, Minerva, appendix D.1), in verl's form, so both
report the same scores. There is no symbolic comparison, because the answers of these data sets are integers.
"""

# ruff: noqa: ARG001 - the signature is the one that all scorers share

import re
from typing import Any

# An answer stands at the end; looking at no more keeps the search cheap on long responses.
_TAIL_CHARACTERS = 300
_BOX_TAIL_CHARACTERS = 100  # of a box, as in verl
_ANSWER = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)
_NO_ANSWER = "[INVALID]"


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None
) -> dict[str, float | bool | str]:
    """Scores a response 1 or -1 (`score`), with `acc`, True if right, and `pred`, the normalised answer."""
    answers = _ANSWER.findall(solution_str[-_TAIL_CHARACTERS:])
    pred = normalise(answers[-1] if answers else _NO_ANSWER)
    return _scored(pred, is_right=ground_truth is not None and pred == normalise(str(ground_truth)))


def compute_boxed_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None
) -> dict[str, float | bool | str]:
    r"""Scores as `compute_score`, but without "Answer:" the last \boxed in the last 100 characters is the answer.

    A box is compared with the ground truth as it stands, without normalisation, as in verl after its version 0.9.
    """
    scored = compute_score(data_source, solution_str, ground_truth)
    box = _last_box(solution_str[-_BOX_TAIL_CHARACTERS:]) if scored["pred"] == _NO_ANSWER else None
    if box is None:
        return scored
    return _scored(box, is_right=ground_truth is not None and box == str(ground_truth))


def _scored(pred: str, *, is_right: bool) -> dict[str, float | bool | str]:
    return {"score": 1.0 if is_right else -1.0, "acc": is_right, "pred": pred}


def _last_box(text: str) -> str | None:
    r"""Returns the content of the last "\boxed{" up to its closing brace; None if one of them is missing."""
    _, box, content = text.rpartition("\\boxed{")
    num_open = 1
    for place, mark in enumerate(content if box else ""):
        num_open += (mark == "{") - (mark == "}")
        if num_open == 0:
            return content[:place]
    return None


# The order counts, because one text may be part of another.
_REPLACED = (
    *((article, "") for article in ("an ", "a ")),
    (".$", "$"),
    *((space, "") for space in (r"\$", r"\ ", " ")),
    ("mbox", "text"),
    (r",\text{and}", ","),
    (r"\text{and}", ","),
    (r"\text{m}", r"\text{}"),
)
_UNITS = (
    "square ways integers dollars mph inches hours km units \\ldots sue points feet minutes digits cents degrees cm gm"
    " pounds meters meals edges students childrentickets multiples"
)
_REMOVED = (
    *_UNITS.split(" "),
    *(r"\text{s}", r"\text{.}", "\\text{\ns}", r"\text{}^2", r"\text{}^3", "\\text{\n}", r"\text{}"),
    *(r"\mathrm{th}", r"^\circ", r"^{\circ}", r"\;", r",\!", "{,}", '"', r"\dots"),
)
_REWRITES = (
    (r".*?\$(.*?)\$.*", r"$\1$"),
    *((rf"\\{command}\{{(.*?)\}}", r"\1") for command in ("text", "textbf", "overline")),
    (r"\\boxed\{(.*)\}", r"\1"),
    (r"frac([^{])(.)", r"frac{\1}{\2}"),
    (r"sqrt([^{])", r"sqrt{\1}"),
    (r"\$", ""),
)


def normalise(answer: str) -> str:
    """Normalises an answer for comparison: only the right-hand side, without articles, units and typesetting."""
    answer = answer.rpartition("=")[2]
    for before, after in (*_REPLACED, *((removed, "") for removed in _REMOVED)):
        answer = answer.replace(before, after)
    for pattern, replacement in _REWRITES:
        answer = re.sub(pattern, replacement, answer)
    digits = answer.replace(",", "")
    return digits if digits.isdigit() else answer.strip()
