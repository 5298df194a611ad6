"""The format `qwen3_coder` : `<tool_call>` with `<function=f>`, `<parameter=a>` and their end tags."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from environments.chat import ToolCall
from environments.schemas import JSON_TYPES
from environments.tool_calls.json_calls import bad_call, call_of, loads

_EXPECTED = "<function=NAME><parameter=NAME>VALUE</parameter></function>"
_START = re.compile(r"<tool_call>|<function=")
_FUNCTION = re.compile(r"<function=([^>]*)>(.*?)(</function>|\Z)", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>]*)>\n?(.*?)\n?(?:</parameter>|(?=<parameter=)|\Z)", re.DOTALL)


def parse(text: str, schemas: Sequence[Mapping[str, Any]]) -> tuple[str, Sequence[ToolCall]]:
    """Returns the text before the first call, and the calls; a function needs its end tag."""
    start = _START.search(text)
    if start is None:
        return text, []
    parameters = {schema["function"]["name"]: schema["function"]["parameters"]["properties"] for schema in schemas}
    found = [_call(match, parameters) for match in _FUNCTION.finditer(text, start.start())]
    return text[: start.start()], found or [bad_call("it has no function", _EXPECTED)]


def _call(function: re.Match[str], schemas: Mapping[str, Mapping[str, Any]]) -> ToolCall:
    name, written, end = function.groups()
    if not end:
        return bad_call("it has no end", _EXPECTED)
    types = {argument: _types_of(schema) for argument, schema in schemas.get(name, {}).items()}
    arguments = {key: _value(value, types.get(key, set())) for key, value in _PARAMETER.findall(written)}
    return call_of({"name": name, "arguments": arguments})


def _types_of(schema: Mapping[str, Any]) -> set[str]:
    """Returns the names of the JSON types that a schema allows."""
    types = schema.get("type", [])
    inner = (_types_of(choice) for choice in schema.get("anyOf", []))
    return set([types] if isinstance(types, str) else types).union(*inner, ["null"] if schema.get("nullable") else [])


def _value(text: str, types: set[str]) -> Any:
    """Reads a value that may be no text as JSON, if it has one of the types that the schema allows."""
    others = types - {"string"}
    try:
        value = loads(text) if others else text
    except (ValueError, RecursionError):
        return text
    name = JSON_TYPES.get(type(value), "object")
    return value if others & {name, "number" if name == "integer" else name} else text
