"""Reads the fields of requests: texts, names, lists, tools and limits; Refused says which field is written wrongly."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from environments.gateway.questions import MODEL, Form, bad_request, canonical, unsupported
from environments.messages import MAX_STOP_TEXTS, MAX_TEXT_BYTES, Schemas, TurnLimits, without_surrogates
from environments.tool_calls.json_calls import finite_json, is_deep

_MAX_DEPTH = 64  # of a tool's schema
_JSON_TYPES = ("string", "number", "integer", "boolean", "object", "array", "null")
# The keywords of a JSON schema under which other schemas lie: by name, or one or a list of them.
_SCHEMAS_BY_NAME = ("properties", "$defs", "definitions")
_SCHEMAS = ("items", "prefixItems", "additionalProperties", "anyOf", "oneOf", "allOf")
_MAX_NAME_LENGTH = 200  # characters of the names and ids of tools and calls
_LARGEST = 2**31 - 1  # of a number of tokens on the wire


def object_of(body: bytes | bytearray) -> Mapping[str, Any]:
    """Reads the JSON object of a request's body, in UTF-8; all its numbers are finite."""
    try:
        fields = finite_json(body.decode("utf-8-sig", "surrogatepass"))
    except (ValueError, RecursionError) as error:
        raise bad_request(f"expected a JSON object as body, got what is no JSON ({error})") from error
    if not isinstance(fields, dict):
        raise bad_request(f"expected a JSON object as body, got {_kind_of(fields)}")
    return fields


def text_of(value: Any, where: str) -> str:
    """Returns a text of a request; None is an empty one."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise bad_request(f"{where}: expected a text, got {_kind_of(value)}")
    text = without_surrogates(value)
    if len(text) > MAX_TEXT_BYTES or len(text.encode()) > MAX_TEXT_BYTES:
        raise bad_request(f"{where}: expected a text of at most 1 MiB, got {len(text):,} characters")
    return text


def text_of_parts(value: Any, kinds: Sequence[str], where: str) -> str:
    """Returns the text of a message's content: a text, or a list of parts whose type is one of `kinds`, joined."""
    if not isinstance(value, list):
        return text_of(value, where)
    texts = []
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in kinds:
            raise unsupported(f"{where}: expected parts of type {' or '.join(kinds)}, got {str(kind)[:60]!r}")
        texts.append(text_of(part.get("refusal" if kind == "refusal" else "text"), where))
    return text_of("".join(texts), where)


def name_of(value: Any, where: str) -> str:
    """Returns a name or an id of a request, which is not empty."""
    if value is None:
        raise bad_request(f"{where}: it is missing")
    name = text_of(value, where)
    if not name or len(name) > _MAX_NAME_LENGTH:
        raise bad_request(f"{where}: expected 1 to {_MAX_NAME_LENGTH} characters, got {len(name)}")
    return name


def list_of(value: Any, where: str) -> Sequence[Mapping[str, Any]]:
    """Returns a list of objects of a request; None is an empty one."""
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
        raise bad_request(f"{where}: expected a list of objects, got {_kind_of(value)}")
    return value


def tools_of(
    fields: Mapping[str, Any], function_of: Callable[[Mapping[str, Any]], Mapping[str, Any] | None], expected: str
) -> Schemas:
    """Returns the schemas of a request's tools.

    `function_of` finds the name, description and parameters of a tool in the way of an API; it returns None for a tool
    of another kind than `expected` says.
    """
    schemas = []
    for number, tool in enumerate(list_of(fields.get("tools"), "tools")):
        where = f"tools[{number}]"
        function = function_of(tool)
        if function is None:
            raise unsupported(f"{where}: expected {expected}")
        schemas.append(_tool_schema(function, where))
    return tuple(schemas)


def _tool_schema(fields: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Returns the schema of a tool as chat templates take it; `fields` are name, description and parameters."""
    parameters = {"type": "object", "properties": {}} | dict(_object_or_empty(fields.get("parameters"), where))
    properties = parameters["properties"]
    if not isinstance(properties, dict) or not all(isinstance(one, dict) for one in properties.values()):
        raise bad_request(f"{where}: expected properties that are objects")
    function: dict[str, Any] = {"name": name_of(fields.get("name"), f"{where}, name")}
    if description := text_of(fields.get("description"), f"{where}, description"):
        function["description"] = description
    function["parameters"] = parameters
    if is_deep(parameters, _MAX_DEPTH):
        raise bad_request(f"{where}: its parameters are nested more than {_MAX_DEPTH} deep")
    _check_types(parameters, f"{where}, parameters")
    try:
        canonical(parameters).encode()
    except UnicodeEncodeError as error:
        raise bad_request(f"{where}: its parameters have half of a character") from error
    return {"type": "function", "function": function}


def _check_types(schema: Any, where: str) -> None:
    """Checks the types that a JSON schema names, at any depth; Refused: there is no such type."""
    if not isinstance(schema, Mapping):
        return
    types = schema.get("type", ())
    for name in types if isinstance(types, list | tuple) else (types,):
        if name not in _JSON_TYPES:
            expected = ", ".join(_JSON_TYPES)
            raise bad_request(f"{where}, type: expected one of {expected}, got {str(name)[:60]!r}")
    for keyword in _SCHEMAS_BY_NAME:
        named = schema.get(keyword)
        for name, one in named.items() if isinstance(named, Mapping) else ():
            _check_types(one, f"{where}, {str(name)[:60]}")
    for keyword in _SCHEMAS:
        value = schema.get(keyword)
        for one in value if isinstance(value, list) else (value,):
            _check_types(one, f"{where}, {keyword}")


def _object_or_empty(value: Any, where: str) -> Mapping[str, Any]:
    if value is not None and not isinstance(value, dict):
        raise bad_request(f"{where}: expected an object as parameters, got {_kind_of(value)}")
    return value or {}


def limits_of(
    fields: Mapping[str, Any], *, max_tokens_key: str, stop_key: str | None = None, with_log_probs: bool = False
) -> TurnLimits:
    """Returns the limits that a request sets under the keys of its API; `stop_key` is None if the API has no stops."""
    max_tokens = fields.get(max_tokens_key)
    stop = None if stop_key is None else fields.get(stop_key)
    if max_tokens is not None and (not isinstance(max_tokens, int) or isinstance(max_tokens, bool) or max_tokens < 1):
        raise bad_request(f"{max_tokens_key}: expected an integer of at least 1, got {str(max_tokens)[:60]}")
    stops = [stop] if isinstance(stop, str) else stop or []
    if not isinstance(stops, list) or len(stops) > MAX_STOP_TEXTS:
        raise bad_request(f"{stop_key}: expected at most {MAX_STOP_TEXTS} texts")
    texts = tuple(name_of(one, str(stop_key)) for one in stops)  # they are as short as names
    return TurnLimits(None if max_tokens is None else min(max_tokens, _LARGEST), texts, with_log_probs)


def ignored_in(fields: Mapping[str, Any], names: Sequence[str], tool_choice: object) -> tuple[str, ...]:
    """Returns which of these parameters a request sets, and `tool_choice` if it is a choice that changes nothing."""
    ignored = [name for name in names if fields.get(name) is not None]
    if tool_choice not in (None, "auto", "none"):
        ignored.append("tool_choice")
    return tuple(ignored)


def form_of(fields: Mapping[str, Any]) -> Form:
    """Returns what a request says about the form of its answer. Any name of a model will do."""
    model = fields.get("model")
    options = fields.get("stream_options")
    instructions = fields.get("instructions")
    max_output_tokens = fields.get("max_output_tokens")
    return Form(
        model=model if isinstance(model, str) and len(model) <= _MAX_NAME_LENGTH else MODEL,
        is_stream=bool(fields.get("stream")),
        with_usage=isinstance(options, dict) and bool(options.get("include_usage")),
        instructions=instructions if isinstance(instructions, str) else None,
        max_output_tokens=max_output_tokens if isinstance(max_output_tokens, int) else None,
    )


def _kind_of(value: Any) -> str:
    names: Mapping[type, str] = {dict: "an object", list: "a list", str: "a text", type(None): "null"}
    return names.get(type(value), str(value)[:60])
