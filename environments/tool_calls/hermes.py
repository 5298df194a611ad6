"""The format `hermes` (Qwen2.5, Qwen3, Hermes): `<tool_call>{"name": "f", "arguments": {...}}</tool_call>`."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from environments.chat import ToolCall
from environments.tool_calls.json_calls import call_of_json

_START = "<tool_call>"
_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)


def parse(text: str, schemas: Sequence[Mapping[str, Any]]) -> tuple[str, Sequence[ToolCall]]:  # noqa: ARG001
    """Returns the text before the first call, and the calls; the last one needs no end tag."""
    before, _, _ = text.partition(_START)
    return before, [call_of_json(written) for written in _CALL.findall(text)]
