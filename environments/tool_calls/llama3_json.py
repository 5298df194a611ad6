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
    start = text.find("{", position)
    is_place_of_call = not text[position:start].rpartition(_THOUGHT_END)[2].replace(_TAG, "").strip(" \t\r\n;")
    while start >= 0:
        end: int | None = start + 1
        if _OBJECT.match(text, start):
            end = _end_of_object(text, start)
            written = text[start:end]
            call, broken_at = read_call(written)
            # What is cut off is meant, too: nobody can say what it would have been.
            if is_place_of_call or end is None or _is_meant(written, call, tools):
                return Written(call, start, start + len(written), is_whole=broken_at is None)
        is_place_of_call = False
        start = text.find("{", end)
    return None


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
