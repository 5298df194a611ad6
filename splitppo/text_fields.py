"""Fills texts with fields in braces, such as "Answer: {ground_truth}": a name stands for a value, and for no more."""

import math
from collections.abc import Mapping
from string import Formatter
from typing import Any

_FORBIDDEN = frozenset(".[]")  # they reach into a value
_MAX_BITS = 1_000  # of an integer; Python refuses to write very long ones


def field_names(template: str) -> tuple[str, ...]:
    """Returns the names of the fields of a template, each once, in their order.

    Raises:
        ValueError: braces that do not match, a field without a name, or one that is more than a name.
    """
    names: dict[str, None] = {}
    for _, name, spec, conversion in _pieces(template):
        if name is None:
            continue
        if not name.strip():
            raise ValueError("it has a field without a name: expected one such as {ground_truth}; {{ is a brace itself")
        if spec or conversion or _FORBIDDEN & set(name):
            raise ValueError(f"the field {name!r} is more than a name: expected one without any of . [ ] ! :")
        names[name] = None
    return tuple(names)


def filled(template: str, values: Mapping[str, str]) -> str:
    """Returns a template, which `field_names` has checked, with these values in the place of its fields."""
    return "".join(text + ("" if name is None else values[name]) for text, name, _, _ in _pieces(template))


def _pieces(template: str) -> list[tuple[str, str | None, str | None, str | None]]:
    """Divides a template into texts, each with the field behind it; ValueError: its braces do not match."""
    try:
        return list(Formatter().parse(template))
    except ValueError as error:
        raise ValueError(f"its braces do not match ({error}); {{{{ and }}}} are braces themselves") from error


def field_text(value: Any) -> str:
    """Returns the value of a field as text: a text, a finite float, or an integer of at most 1,000 bits.

    Raises:
        ValueError: it is neither; the sentence has its type alone, because the value may be a secret.
    """
    if isinstance(value, str):
        return value
    kind = f"an object of type {type(value).__name__}"
    if isinstance(value, float):
        if math.isfinite(value):
            return str(value)
        kind = "a number that is not finite"
    elif isinstance(value, int) and not isinstance(value, bool):
        if value.bit_length() <= _MAX_BITS:
            return str(value)
        kind = f"an integer of more than {_MAX_BITS:,} bits"
    raise ValueError(f"expected a text or a number, got {'nothing' if value is None else kind}")
