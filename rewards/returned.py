"""Reads what a function of the user's returned: a score, or a dict with 'score', as plain values.

Scoring processes import this module, so it imports nothing heavy.
"""

import math
import sys
from collections.abc import Mapping
from typing import Any

# The largest score or reward. Sums over tokens, turns and rows, and their squares, then stay finite in float32.
LARGEST = 1e12


def finite_number(value: Any, expected: str, source: str = "the scorer") -> float:
    """Converts a value that a scorer, or another `source`, returned to a float of at most LARGEST in size.

    Raises TypeError or ValueError if the value is no number, not finite or larger. The error says what was `expected`.
    """
    if isinstance(value, str | bytes):  # float() would take some of them
        raise TypeError(f"{source} returned {value[:60]!r}, expected {expected}")
    try:
        number = float(value)
    except TypeError as error:
        kind = "None" if value is None else f"an object of type {type(value).__name__}"
        raise TypeError(f"{source} returned {kind}, expected {expected}") from error
    except OverflowError as error:
        raise ValueError(f"{source} returned a number that no float can hold") from error
    if not math.isfinite(number):
        raise ValueError(f"{source} returned {number}, which is not a finite number")
    if abs(number) > LARGEST:
        raise ValueError(f"{source} returned {number:g}; expected a number from {-LARGEST:g} to {LARGEST:g}")
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
