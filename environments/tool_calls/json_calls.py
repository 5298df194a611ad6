"""Reads calls of tools that are JSON objects with a name and arguments."""

import json
from typing import Any

from environments.chat import ToolCall

# What is nested deeper is no call: pickle can take less than `json.loads`.
_MAX_DEPTH = 64


def loads(text: str) -> Any:
    """Reads JSON; ValueError also for NaN and Infinity, which are none; RecursionError for what is too deep."""
    return json.loads(text, parse_constant=_refused)


def call_of_json(text: str) -> ToolCall:
    """Reads a call from the text of a JSON object."""
    try:
        return call_of(loads(text))
    except (ValueError, RecursionError) as error:
        return bad_call(f"it is no JSON ({error})")


def call_of(written: Any) -> ToolCall:
    """Reads a call from a JSON value: an object with `name`, and `arguments` or `parameters`."""
    if not isinstance(written, dict):
        return bad_call(f"it is {json.dumps(written)[:60]}")
    name, arguments = written.get("name"), written.get("arguments", written.get("parameters"))
    if not isinstance(name, str):
        return bad_call("it has no name")
    if not isinstance(arguments, dict):
        return bad_call("its arguments are no JSON object")
    if _is_deep(arguments, _MAX_DEPTH):
        return bad_call(f"its arguments are nested more than {_MAX_DEPTH} deep")
    # The text of a JSON string may name halves of characters; they become "?".
    if "\\ud" in json.dumps(arguments):
        arguments = json.loads(json.dumps(arguments, ensure_ascii=False).encode("utf-8", "replace"))
    return ToolCall(name.encode("utf-8", "replace").decode(), arguments)


def _is_deep(value: Any, depth: int) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return not depth or any(_is_deep(one, depth - 1) for one in inner)


def _refused(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def bad_call(reason: str, expected: str = '{"name": ..., "arguments": {...}}') -> ToolCall:
    """Returns a call with an error, which stands for text that is no call."""
    return ToolCall("", {}, error=f"this is no call of a tool: {reason}; expected {expected}")
