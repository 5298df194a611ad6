"""The format `llama3_json` (Llama 3.1 to 3.3): `{"name": "f", "parameters": {...}}`; several are separated by ";"."""

import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from environments.chat import ToolCall
from environments.tool_calls.json_calls import read_call
from environments.tool_calls.turn import Written, read_calls

_TAG = "<|python_tag|>"
_THOUGHT_END = "</think>"
_ARGUMENTS = ('"parameters"', '"arguments"')
_OBJECT = re.compile(r"""\{\s*(?:["'}]|\Z)""")  # begins as a JSON object does; other braces are text
_CALL = re.compile(r"""\{\s*["'](?:name|type|function|parameters|arguments)["']\s*:""")
_PART = re.compile(r'"(?:[^"\\]|\\.)*+"|["{}]', re.DOTALL)  # a string, one without an end, a brace


def parse(text: str, schemas: Sequence[Mapping[str, Any]]) -> tuple[str, Sequence[ToolCall]]:
    """Returns the text before the first object that is a call, and the calls.

    An object is meant as a call if a call has its place there (at the beginning, or behind another call), or if it has
    arguments or the name of a tool. Other braces in a sentence are text.
    """
    tools = {schema["function"]["name"] for schema in schemas}
    before, calls = read_calls(text, partial(_find, tools=tools))
    is_tagged = bool(calls) and before.rstrip().endswith(_TAG)
    return before.rstrip().removesuffix(_TAG) if is_tagged else before, calls


def _find(text: str, position: int, tools: set[str]) -> Written | None:
    """Returns the next object from `position` on that is meant as a call (see `parse`), or that is cut off.

    Returns None if there is none. What is cut off counts, because nobody can say what it would have been. `position` is
    the beginning of the text, or the end of the call before.
    """
    first = text.find("{", position)
    start = first
    while start >= 0:
        end: int | None = start + 1  # of a brace that begins no object
        if _OBJECT.match(text, start):
            end = _end_of_object(text, start)
            written = text[start:end]
            call, broken_at = read_call(written)
            has_place_of_call = start == first and _says_nothing(text[position:start])
            is_cut_off = end is None
            if has_place_of_call or is_cut_off or _is_meant(written, call, tools):
                return Written(call, start, start + len(written), is_whole=broken_at is None)
        start = text.find("{", end)
    return None


def _says_nothing(before: str) -> bool:
    """Returns True if the text before an object leaves it the place of a call: thoughts, tags and separators alone."""
    answer = before.rpartition(_THOUGHT_END)[2]
    return not answer.replace(_TAG, "").strip(" \t\r\n;")


def _end_of_object(text: str, start: int) -> int | None:
    """Returns the index behind the brace that closes the object; None if none does."""
    depth = 0
    for part in _PART.finditer(text, start):
        if part[0] == '"':
            return None
        depth += {"{": 1, "}": -1}.get(part[0], 0)
        if depth == 0:
            return part.end()
    return None


def _is_meant(written: str, call: ToolCall, tools: set[str]) -> bool:
    """Returns True if an object is meant as a call also in the middle of a sentence."""
    is_begun = bool(call.error) and _CALL.match(written) is not None
    return is_begun or call.name in tools or any(name in written for name in _ARGUMENTS)
