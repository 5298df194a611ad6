"""The format `llama3_json` (Llama 3.1 to 3.3): `{"name": "f", "parameters": {...}}`; several are separated by ";"."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from environments.chat import ToolCall
from environments.tool_calls.json_calls import bad_call, call_of

_TAG = "<|python_tag|>"


def parse(text: str, schemas: Sequence[Mapping[str, Any]]) -> tuple[str, Sequence[ToolCall]]:  # noqa: ARG001
    """Returns the text before the first object, and the calls; an object in a sentence that is no call is text."""
    start, calls = text.find("{"), list[ToolCall]()
    end = start
    while end >= 0:
        try:
            value, end = json.JSONDecoder().raw_decode(text, end)
            calls.append(call_of(value))
        except (ValueError, RecursionError) as error:
            calls.append(bad_call(f"it is no JSON ({error})"))
            break
        end = text.find("{", end)
    before = text[: max(start, 0)].replace(_TAG, "")
    if start < 0 or (before.strip() and any(call.error for call in calls)):
        return text, []
    return before, calls
