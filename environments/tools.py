"""A tool: a typed function of the user's with its JSON schema, whose arguments are checked before it is called."""

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NotRequired, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError, with_config
from typing_extensions import TypedDict

from environments.chat import Step, TookTooLong
from environments.messages import MAX_TEXT_BYTES, without_surrogates
from environments.schemas import schema_of


@dataclass(frozen=True)
class Tool:
    """A function that the model may call; of a method, the function that still takes the object.

    Attributes:
        takes_row: True if the first argument is the row, a dict that the tools of one conversation share.
        places: what a call waits for before its time begins.
        read: makes a `Step`, or what becomes one, of what the function returned.
    """

    function: Callable[..., Any]
    schema: Mapping[str, Any]
    _arguments: TypeAdapter[dict[str, Any]] | None = None
    takes_row: bool = False
    places: asyncio.Semaphore | None = None
    read: Callable[[Any], Any] = lambda result: result

    @property
    def name(self) -> str:
        """The name by which the model calls it."""
        return str(self.schema["function"]["name"])

    @classmethod
    def of(cls, function: Callable[..., Any]) -> "Tool":
        """Makes a tool of a typed function with a docstring; ValueError says what is wrong with it."""
        schema = schema_of(function)
        names = schema["function"]["parameters"]
        hints = get_type_hints(function, include_extras=True)
        fields = {
            name: hints[name] if name in names.get("required", ()) else NotRequired[hints[name]]
            for name in names["properties"]
        }
        config = ConfigDict(extra="forbid", arbitrary_types_allowed=True, allow_inf_nan=False)
        arguments = with_config(config)(TypedDict("arguments", fields))  # type: ignore[operator]
        return cls(function, schema, TypeAdapter(arguments))

    def check(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the arguments as the function takes them; ValueError says what was expected of which argument."""
        if self._arguments is None:
            return dict(arguments)
        try:
            return self._arguments.validate_python(dict(arguments))
        except ValidationError as error:
            wrong = (f"{'.'.join(map(str, one['loc'])) or 'arguments'}: {one['msg']}" for one in error.errors())
            raise ValueError("; ".join(wrong)) from error


def step_of(result: Any) -> Step:
    """Returns what a tool or an environment returned as a `Step` with a text; what is no text becomes one.

    Raises:
        ValueError: the text is longer than 1 MiB.
    """
    step = result if isinstance(result, Step) else Step(result)
    text = _text_of(step.text)
    if len(text) > MAX_TEXT_BYTES or len(text.encode()) > MAX_TEXT_BYTES:
        raise ValueError(f"the result has {len(text):,} characters, more than 1 MiB")
    return replace(step, text=text)


def _text_of(value: Any) -> str:
    """Returns what the model reads of a value that a tool returned: texts as they are, JSON for lists and the like."""
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if value is None or isinstance(value, bool | dict | list | tuple):
        try:
            value = json.dumps(value, ensure_ascii=False, default=str)
        except (TypeError, ValueError, RecursionError):
            value = str(value)
    return without_surrogates(str(value))


def message_of(error: BaseException) -> str:
    """Returns the message of an exception, or its type if it has none."""
    try:
        return without_surrogates(str(error)) or type(error).__name__
    except Exception:  # noqa: BLE001 - its __str__ is the user's
        return type(error).__name__


def reason_of(error: BaseException) -> str:
    """Returns why code of the user's failed: the type and the message of what it raised, or that it took too long."""
    return message_of(error) if isinstance(error, TookTooLong) else f"{type(error).__name__}: {message_of(error)}"
