"""The format `hermes` (Qwen2.5, Qwen3, Hermes): `<tool_call>{"name": "f", "arguments": {...}}</tool_call>`."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from environments.chat import ToolCall
from environments.tool_calls.json_calls import read_call
from environments.tool_calls.turn import Written, read_calls

_START = "<tool_call>"
_END = "</tool_call>"
# JSON up to a tag that is in none of its strings. A backslash outside of strings is no JSON.
_JSON = re.compile(r'(?:[^"<\\]|"(?:[^"\\]|\\.)*+"|<(?!/?tool_call>))*+', re.DOTALL)


def parse(text: str, schemas: Sequence[Mapping[str, Any]]) -> tuple[str, Sequence[ToolCall]]:  # noqa: ARG001
    """Returns the text before the first call, and the calls; a call ends with its tag, the next call, or the text."""
    return read_calls(text, _find)


def _find(text: str, position: int) -> Written | None:
    """Finds a call. A broken one lasts up to the first end tag behind the place where it is broken.

    Without a bracket behind it, a start tag stands alone: what follows may have calls that are whole.
    """
    start = text.find(_START, position)
    if start < 0:
        return None
    begin = start + len(_START)
    json_text = _JSON.match(text, begin)
    end = begin if json_text is None else json_text.end()
    call, broken_at = read_call(text[begin:end])
    if broken_at is None:
        return Written(call, start, end)
    if not text[begin:end].lstrip().startswith(("{", "[")):
        return Written(call, start, begin)
    tag = text.find(_END, begin + broken_at)
    return Written(call, start, len(text) if tag < 0 else tag + len(_END), is_whole=False)
