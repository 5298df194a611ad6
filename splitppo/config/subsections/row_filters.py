"""The configuration keys `data.filters` and `data.val_filters`: conditions on the columns of a data file."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, TypeGuard

from pydantic import BeforeValidator

from splitppo.config.section import Section

_Plain = str | bool | int | float


class ValueRange(Section):
    """A condition on a column of a data file: numbers from `min` to `max`, both included; null is no bound."""

    min: float | None = None
    max: float | None = None


Condition = ValueRange | tuple[_Plain, ...]


def passes(value: object, condition: Condition) -> bool:
    """Returns True if a value of a data file's column meets the user's condition: a range, or a list of allowed values.

    A bool is never equal to a number here: true and 1 are different values.
    """
    if isinstance(condition, ValueRange):
        if not _is_number(value):
            return False
        low = condition.min
        high = condition.max
        return (low is None or value >= low) and (high is None or value <= high)
    return any(value == plain and isinstance(value, bool) == isinstance(plain, bool) for plain in condition)


def _is_number(value: object) -> TypeGuard[int | float]:
    """Returns True if the value is an int or a float; a bool does not count."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _by_column(filters: Any) -> Any:
    """Converts nested conditions to dotted columns: `{extra_info: {level: 3}}` becomes `{extra_info.level: (3,)}`.

    A mapping of `min` and `max` alone is a range and stays a mapping.
    """
    return dict(_columns(filters)) if isinstance(filters, Mapping) else filters


def _columns(filters: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (dotted column, condition) of nested conditions; a mapping of `min` and `max` alone is a condition."""
    for name, condition in filters.items():
        column = f"{prefix}{name}"
        if isinstance(condition, Mapping) and condition and not condition.keys() <= ValueRange.model_fields.keys():
            yield from _columns(condition, f"{column}.")
        else:
            yield column, _condition(column, condition)


def _condition(column: str, given: Any) -> Any:
    """Checks what a column is compared with: returns bounds as they are, and one value or a list as a tuple of values.

    Raises:
        ValueError: it is none of these, a bound is no number, or there is none.
    """
    if isinstance(given, Mapping):
        bounds = [bound for bound in given.values() if bound is not None]
        if bounds and all(map(_is_number, bounds)):
            return given
    else:
        values = given if isinstance(given, list | tuple) else [given]
        if values and all(isinstance(value, _Plain) for value in values):
            return tuple(values)
    raise ValueError(f"{column}: expected a value, a list of values, or a number as min or max; found {given!r}")


RowFilters = Annotated[dict[str, Condition], BeforeValidator(_by_column)]
