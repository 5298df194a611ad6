"""Checks the values of a data row: texts must be ones that can be encoded; a null means that there is no value.

Parquet gives every mapping of a column the keys of all of them; a key that a row does not have is a null. So a null in
a mapping means that there is no such key, wherever the row comes from.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

_MAX_DEPTH = 100


def without_nulls(value: Any) -> Any:
    """Returns a copy of a value without the keys of mappings whose values are null, at any depth."""
    if isinstance(value, Mapping):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value


def is_missing(ground_truth: Any) -> bool:
    """Returns True for null and NaN, as pandas writes it, and for mappings and lists that hold nothing else."""
    if isinstance(ground_truth, float):
        return math.isnan(ground_truth)
    if isinstance(ground_truth, Mapping | list) and ground_truth:
        return all(map(is_missing, ground_truth.values() if isinstance(ground_truth, Mapping) else ground_truth))
    return ground_truth is None


def check_text(text: str) -> str:
    """Returns a text that UTF-8 can encode.

    Raises:
        ValueError: the text has one half of a surrogate pair alone, such as an emoji that was cut.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = ascii(text[error.start])[1:-1]
        place = f"({half}, character {error.start + 1})"
        raise ValueError(f"it has half of a surrogate pair {place}, which is no text") from error
    return text


def check_texts(value: Any, check: Callable[[str], object] = check_text, depth: int = 0) -> int:
    """Checks all texts in a value, at any depth, keys included; returns how many characters they have together.

    Raises:
        ValueError: `check` refuses a text, or mappings and lists lie in each other more than 100 deep.
    """
    if depth > _MAX_DEPTH:
        raise ValueError(f"mappings and lists lie in each other more than {_MAX_DEPTH} deep")
    if isinstance(value, str):
        check(value)
        return len(value)
    if isinstance(value, Mapping):
        value = [*value, *value.values()]
    if isinstance(value, list | tuple):
        return sum(check_texts(item, check, depth + 1) for item in value)
    return 0
