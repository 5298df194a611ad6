"""Reads what a function of the user's returned: a score, or a dict with 'score', as plain values.

Scoring processes import this module, so it imports nothing heavy.
"""

import sys
from collections.abc import Mapping
from typing import Any

LARGEST = 3.4028234e38  # the largest number of float32; scores are converted to it


def finite_number(value: Any, expected: str, source: str = "the scorer") -> float:
    """Converts a value that a scorer, or another `source`, returned to a float that float32 can represent.

    Raises TypeError or ValueError if the value is no number, or not finite in float32. The error says what was
    `expected`.
    """
    if isinstance(value, str | bytes):  # float() would take some of them
        raise TypeError(f"{source} returned {value[:60]!r}, expected {expected}")
    try:
        number = float(value)
    except OverflowError as error:
        raise ValueError(f"{source} returned a number that float32 cannot hold") from error
    if not abs(number) <= LARGEST:
        raise ValueError(f"{source} returned {number}, which is not a finite number of float32")
    return number


def score_and_fields(result: Any, source: str = "the scorer") -> tuple[float, dict[str, Any]]:
    """Splits the value that a scorer, or another `source`, returned: its score, and the other fields of its dict.

    Raises TypeError or ValueError if the value is no score.
    """
    fields = dict(result) if isinstance(result, Mapping) else {"score": result}
    if "score" not in fields:
        raise ValueError(f"{source}'s dict has no 'score', only {', '.join(map(str, fields)) or 'nothing'}")
    return finite_number(fields.pop("score"), "a number, or a dict with 'score'", source), fields


def plain(value: Any) -> Any:
    """Converts a value of the user's to a plain bool, number, string or None; anything else becomes text.

    Scalars of numpy and torch become numbers of Python; integers that no float can hold become text.
    """
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        value = value.item()
    if isinstance(value, int) and abs(value) > sys.float_info.max:
        return hex(value)
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)  # the controller cannot load a subclass of the user's, such as an IntEnum
    return value if value is None else str(value)
