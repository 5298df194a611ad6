"""JSON schemas of typed functions with a Google docstring, as chat templates take them.

The schemas are those of transformers' `get_json_schema`, which cannot be imported where the controller runs.
"""

import inspect
import json
import re
import types
from collections.abc import Callable, Mapping
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

_SECTION = r"(?:Args|Returns|Raises):"
_ARGUMENT = re.compile(r"(?:^|\n)\s*(\w+):\s*(.*?)\s*(?=\n\s*\w+:|\Z)", re.DOTALL)
_CHOICES = re.compile(r"\(choices:\s*(.*?)\)\s*$", re.IGNORECASE)
JSON_TYPES = {
    int: "integer",
    float: "number",
    str: "string",
    bool: "boolean",
    types.NoneType: "null",
    list: "array",
    tuple: "array",
}


def schema_of(function: Callable[..., Any]) -> dict[str, Any]:
    """Returns the JSON schema of a function or method; an untyped first parameter `self` is left out.

    Raises:
        ValueError: the function has no docstring, an argument without a type or a description, or a type that has no
            schema; the sentence names the argument, not the function.
    """
    doc = inspect.getdoc(function)
    if not doc or not doc.strip():
        raise ValueError("it has no docstring; expected one that says what it does")
    description, described, returned = _read_docstring(doc.strip())
    hints, required = _hints_of(function)
    properties = {}
    for name, hint in hints.items():
        schema = _schema_of_type(hint, name)
        if name == "return":
            continue
        if name not in described:
            raise ValueError(f"argument {name!r} has no description; expected a line under Args")
        properties[name] = {**schema, **_description(described[name], name)}
    parameters = {"type": "object", "properties": properties} | ({"required": required} if required else {})
    schema = {"name": function.__name__, "description": description, "parameters": parameters}
    if "return" in hints:
        schema["return"] = _schema_of_type(hints["return"], "return")
        if returned is not None:
            schema["return"]["description"] = returned
    return {"type": "function", "function": schema}


def _hints_of(function: Callable[..., Any]) -> tuple[dict[str, Any], list[str]]:
    """Returns the types of a function's arguments and of its value, and the names of those without a default."""
    parameters = dict(inspect.signature(function).parameters)
    first = next(iter(parameters), "")
    if first in ("self", "cls") and parameters[first].annotation is inspect.Parameter.empty:
        del parameters[first]
    for name, parameter in parameters.items():
        if parameter.annotation is inspect.Parameter.empty:
            raise ValueError(f"argument {name!r} has no type; expected one, as in {name}: str")
        if parameter.kind not in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY):
            raise ValueError(f"argument {name!r} cannot be given by name; expected arguments with names only")
    try:
        hints = get_type_hints(function)
    except Exception as error:
        raise ValueError(f"its types cannot be read: {error}") from error
    return hints, [name for name, parameter in parameters.items() if parameter.default is inspect.Parameter.empty]


def _read_docstring(doc: str) -> tuple[str, Mapping[str, str], str | None]:
    """Splits a Google docstring: what the function does, its arguments' descriptions, what it returns."""
    description = re.split(rf"\s*{_SECTION}", doc, maxsplit=1)[0].strip()
    arguments = re.search(r"\n\s*Args:\n\s*(.*?)[\n\s]*(Returns:|Raises:|\Z)", doc, re.DOTALL)
    returned = re.search(r"\n\s*Returns:\n\s*(.*?)[\n\s]*(Raises:|\Z)", doc, re.DOTALL)
    lines = "\n".join(line for line in (arguments.group(1) if arguments else "").strip().split("\n") if line.strip())
    described = {name: re.sub(r"\s*\n+\s*", " ", text.strip()) for name, text in _ARGUMENT.findall(lines)}
    return description, described, returned.group(1).strip() if returned else None


def _description(text: str, name: str) -> dict[str, Any]:
    """Returns an argument's description, and the values it may have if the text ends with (choices: [...])."""
    choices = _CHOICES.search(text)
    if choices is None:
        return {"description": text}
    try:
        values = [value.strip() if isinstance(value, str) else value for value in json.loads(choices.group(1))]
    except (ValueError, TypeError) as error:
        raise ValueError(f"argument {name!r}: expected choices as a JSON list, got {choices.group(1)}") from error
    return {"enum": values, "description": text[: choices.start()].strip()}


def _schema_of_type(hint: Any, name: str) -> dict[str, Any]:
    """Returns the JSON schema of the type hint of the argument `name`; ValueError for types that have none."""
    origin = get_origin(hint)
    arguments = get_args(hint)
    if origin is None:
        return {} if hint is Any else {"type": JSON_TYPES.get(hint, "object")}
    if origin in (Union, types.UnionType):
        return _schema_of_union(arguments, name)
    if origin is Literal and all(type(value) in (int, float, str, bool, types.NoneType) for value in arguments):
        names = list(dict.fromkeys(JSON_TYPES[type(value)] for value in arguments))
        return {"type": names[0] if len(names) == 1 else names, "enum": list(arguments)}
    if origin is list:
        return {"type": "array", "items": _schema_of_type(arguments[0], name)}
    if origin is tuple and len(arguments) > 1 and ... not in arguments:
        return {"type": "array", "prefixItems": [_schema_of_type(argument, name) for argument in arguments]}
    if origin is dict:
        return {"type": "object", "additionalProperties": _schema_of_type(arguments[1], name)}
    raise ValueError(f"argument {name!r} has the type {str(hint).replace('typing.', '')}, for which there is no schema")


def _schema_of_union(types_: tuple[Any, ...], name: str) -> dict[str, Any]:
    """Returns the JSON schema of a union; None in it makes the schema nullable.

    Simple types share one schema, with a list as `type`; others stand in `anyOf`.
    """
    schemas = [_schema_of_type(hint, name) for hint in types_ if hint is not types.NoneType]
    if len(schemas) == 1:
        schema = schemas[0]
    elif all(schema.keys() == {"type"} and isinstance(schema["type"], str) for schema in schemas):
        names = sorted({schema["type"] for schema in schemas})
        schema = {"type": names[0] if len(names) == 1 else names}
    else:
        schema = {"anyOf": schemas}
    return schema | ({"nullable": True} if types.NoneType in types_ else {})
