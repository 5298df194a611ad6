"""Reads calls of tools that are JSON objects with a name and arguments."""

import json
import math
from typing import Any

from environments.chat import ToolCall

# What is nested deeper is no call, action or reward: pickle and `repr` can take less than `json.loads`.
MAX_DEPTH = 64
_KEYS = ("name", "arguments", "parameters")


class NotFinite(ValueError):
    """Raised for a number that JSON or a float has no place for: NaN, Infinity, 1e999."""


def loads(text: str) -> Any:
    """Reads JSON that has one meaning.

    Raises:
        ValueError: it is none, or an object has a key twice, or a number is not finite (`NotFinite`).
        RecursionError: it is nested too deep.
    """
    return _DECODER.decode(text)


def finite_json(text: str) -> Any:
    """Reads JSON of which all numbers are finite; ValueError, RecursionError: see `loads`."""
    return json.loads(text, parse_constant=_refused, parse_float=_finite, parse_int=_whole)


def read_call(text: str) -> tuple[ToolCall, int | None]:
    """Reads a call from the text of a JSON object; returns also the index at which it is no JSON, None if it is."""
    try:
        return call_of(loads(text)), None
    except (ValueError, RecursionError) as error:
        broken_at = error.pos if isinstance(error, json.JSONDecodeError) else None
        return bad_call(f"it is no JSON ({error})"), broken_at


def call_of(written: Any) -> ToolCall:
    """Reads a call from a JSON value: an object with `name`, and `arguments` or `parameters` if there are any.

    It may also have `"type": "function"`. Any other key is an error, because it may stand for arguments.
    """
    if not isinstance(written, dict):
        return bad_call(f"it is {json.dumps(written)[:60]}")
    name = written.get("name")
    if not isinstance(name, str):
        return bad_call("it has no name")
    if "arguments" in written and "parameters" in written:
        return bad_call("it has both arguments and parameters")
    other = next((key for key in written if key not in _KEYS and (key, written[key]) != ("type", "function")), None)
    if other is not None:
        return bad_call(f"it has the key {other[:60]!r}")
    arguments = written.get("arguments", written.get("parameters", {}))
    if not isinstance(arguments, dict):
        return bad_call("its arguments are no JSON object")
    if is_deep(arguments, MAX_DEPTH):
        return bad_call(f"its arguments are nested more than {MAX_DEPTH} deep")
    try:
        _check_characters([name, arguments])
    except ValueError as error:
        return bad_call(str(error))
    return ToolCall(name, arguments)


def read_value(text: str) -> Any:
    """Reads JSON that has one meaning, and that any other program can take; ValueError: it is none."""
    try:
        value = loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error
    if is_deep(value, MAX_DEPTH):
        raise ValueError(f"it is nested more than {MAX_DEPTH} deep")
    _check_characters(value)
    return value


def _check_characters(value: Any) -> None:
    """Raises ValueError if a text of a JSON value names half of a character, which nothing can encode."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"it has half of a character, {error.object[error.start]!r}") from error


def is_deep(value: Any, depth: int) -> bool:
    """Returns True if objects and lists are nested more than so deep in a value."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return not depth or any(is_deep(one, depth - 1) for one in inner)


def _refused(constant: str) -> None:
    raise NotFinite(f"{constant} is no JSON")


def _finite(written: str) -> float:
    """Reads a number of JSON; NotFinite if no float is as large."""
    number = float(written)
    if math.isinf(number):
        raise NotFinite(f"{written[:60]} is too large for a number")
    return number


def _whole(written: str) -> int:
    """Reads a whole number of JSON; NotFinite if no float is as large."""
    _finite(written)
    return int(written)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Makes a dictionary of the pairs of a JSON object; ValueError if it has a key twice."""
    fields: dict[str, Any] = {}
    for name, value in pairs:
        if name in fields:
            raise ValueError(f"it has {name[:60]!r} twice")
        fields[name] = value
    return fields


_DECODER = json.JSONDecoder(parse_constant=_refused, parse_float=_finite, parse_int=_whole, object_pairs_hook=_object)


def bad_call(reason: str, expected: str = '{"name": ..., "arguments": {...}}') -> ToolCall:
    """Returns a call with an error, which stands for text that is no call."""
    return ToolCall("", {}, error=f"this is no call of a tool: {reason}; expected {expected}")
