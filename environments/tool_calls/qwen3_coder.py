"""The format `qwen3_coder` : `<tool_call>` with `<function=f>`, `<parameter=a>` and their end tags.

    <tool_call>
    <function=f>
    <parameter=a>
    a value, as it is
    </parameter>
    </function>
    </tool_call>

Values are not escaped. A tag inside of a line belongs to the value. One that has a line of its own ends the value if it
is the end tag and what must follow it does; otherwise nobody can say where the value ends, and the call is broken. So
it is if end tags are left over behind it: then a value had tags, and was cut off.
"""

import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from environments.chat import ToolCall
from environments.schemas import JSON_TYPES
from environments.tool_calls.json_calls import NotFinite, bad_call, call_of, loads
from environments.tool_calls.turn import Written, read_calls

_EXPECTED = "<function=NAME><parameter=NAME>VALUE</parameter></function>"
_START = re.compile(r"<tool_call>|<function=")
_FUNCTION = re.compile(r"(?:<tool_call>\s*)?<function=([^<>\n]*)>\s*")
_PARAMETER = re.compile(r"<parameter=([^<>\n]*)>(\n?)")
_PARAMETER_END = "</parameter>"
_ANY_TAG = r"(?:</parameter>|<parameter=[^<>\n]*>|</function>|<function=[^<>\n]*>|</?tool_call>)"
_TAG = re.compile(_ANY_TAG)
_TAG_LINE = re.compile(rf"^{_ANY_TAG}$", re.MULTILINE)
_FUNCTION_END = re.compile(r"</function>\s*(?:</tool_call>|(?=<tool_call>|<function=|\Z))")
_CALL_END = re.compile(r"</tool_call>|\Z")
_NEXT_TAG = re.compile(r"(?P<left_over></(?:parameter|function|tool_call)>)|<tool_call>|<function=")
_SPACES = re.compile(r"\s*")

Types = Mapping[str, Mapping[str, set[str]]]  # JSON types of the parameters of each tool


class _Broken(Exception):
    """Raised for a call that is broken: why, where, and whether what follows may be a part of it."""

    def __init__(self, reason: str, position: int, *, hides_rest: bool) -> None:
        super().__init__(reason)
        self.position = position
        self.hides_rest = hides_rest


def parse(text: str, schemas: Sequence[Mapping[str, Any]]) -> tuple[str, Sequence[ToolCall]]:
    """Returns the text before the first call, and the calls; a function and its parameters need their end tags."""
    types = {
        schema["function"]["name"]: {
            name: _types_of(parameter) for name, parameter in schema["function"]["parameters"]["properties"].items()
        }
        for schema in schemas
    }
    return read_calls(text, partial(_find, types=types))


def _find(text: str, position: int, types: Types) -> Written | None:
    """Returns the next call that begins at or behind a position of a text; None without one.

    A call that is broken is returned, too, with an error that says why.
    """
    tag = _START.search(text, position)
    if tag is None:
        return None
    start = tag.start()
    function = _FUNCTION.match(text, start)
    if function is None:
        return Written(bad_call("it has no function", _EXPECTED), start, tag.end())
    try:
        parameters, end = _read_parameters(text, function.end())
    except _Broken as broken:
        return Written(
            bad_call(str(broken), _EXPECTED), start, broken.position, is_whole=False, hides_rest=broken.hides_rest
        )
    next_tag = _NEXT_TAG.search(text, end)
    if next_tag is not None and next_tag["left_over"]:
        reason = f"{next_tag['left_over']} is left over behind it"
        return Written(bad_call(reason, _EXPECTED), start, end, hides_rest=True, is_end_of_another=True)
    return Written(_call(function[1], parameters, types.get(function[1], {})), start, end)


def _read_parameters(text: str, position: int) -> tuple[Sequence[tuple[str, str]], int]:
    """Reads the parameters of a function; returns their names and values, and the index behind the end of the call."""
    parameters = []
    while (tag := _PARAMETER.match(text, position)) is not None:
        name = tag[1]
        begin = tag.end()
        has_lines = bool(tag[2])
        end = (_TAG_LINE if has_lines else _TAG).search(text, begin)
        if end is None or end[0] != _PARAMETER_END:
            broken_at = len(text) if end is None else end.start()
            raise _Broken(f"the value of {name!r} has no end", broken_at, hides_rest=True)
        parameters.append((name, text[begin : end.start()].removesuffix("\n")))
        spaces = _SPACES.match(text, end.end())
        position = end.end() if spaces is None else spaces.end()
    function_end = _FUNCTION_END.match(text, position)
    if function_end is not None:
        return parameters, function_end.end()
    call_end = _CALL_END.match(text, position)
    if call_end is not None:
        raise _Broken("it has no end", call_end.end(), hides_rest=False)
    raise _Broken(f"there is {text[position : position + 20]!r} where a tag was expected", position, hides_rest=True)


def _call(name: str, parameters: Sequence[tuple[str, str]], types: Mapping[str, set[str]]) -> ToolCall:
    """Makes the call of a function from its parameters as they are written; `types` are those of the tool's schema."""
    arguments: dict[str, Any] = {}
    for key, written in parameters:
        if key in arguments:
            return bad_call(f"it has {key!r} twice", _EXPECTED)
        try:
            arguments[key] = _value(written, types.get(key, set()))
        except NotFinite as error:
            return bad_call(f"the value of {key!r} is no number ({error})", _EXPECTED)
    return call_of({"name": name, "arguments": arguments})


def _types_of(schema: Mapping[str, Any]) -> set[str]:
    """Returns the names of the JSON types that a schema allows."""
    types = schema.get("type", [])
    inner = (_types_of(choice) for choice in schema.get("anyOf", []))
    return set([types] if isinstance(types, str) else types).union(*inner, ["null"] if schema.get("nullable") else [])


def _value(text: str, types: set[str]) -> Any:
    """Reads a value that may be no text as JSON, if it has one of the types that the schema allows.

    What is of another type stays a text, which is refused when arguments are checked. NotFinite: it is a number that is
    not finite, and the schema allows no text.
    """
    others = types - {"string"}
    if not others:
        return text
    try:
        value = loads(text)
    except NotFinite:
        if "string" in types:
            return text
        raise
    except (ValueError, RecursionError):
        return text
    name = JSON_TYPES.get(type(value), "object")
    return value if others & {name, "number" if name == "integer" else name} else text
