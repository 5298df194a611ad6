"""Messages as chat templates take them: what a request says becomes these, whatever API it was written for."""

from collections.abc import Mapping, Sequence
from typing import Any

from environments.gateway.questions import bad_request
from environments.messages import Message, without_surrogates
from environments.tool_calls.json_calls import call_of, loads


def system_message(text: str) -> Message:
    """Returns a message of the system."""
    return {"role": "system", "content": text}


def user_message(text: str) -> Message:
    """Returns a message of the user."""
    return {"role": "user", "content": text}


def assistant_message(text: str, calls: Sequence[Message] = (), reasoning: str = "") -> Message:
    """Returns a message of the assistant, as chat templates take it; `calls` are those of `template_call`."""
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if calls:
        message["tool_calls"] = list(calls)
    if reasoning:
        message["reasoning_content"] = reasoning
    return message


def tool_result(text: str, call_id: str, before: Sequence[Message]) -> Message:
    """Returns the message with the result of a call; the name of its tool is that of the call in the messages before.

    It has the keys of `environments.chat.tool_message`, so that a chat template writes the same for both.
    """
    calls = (call for message in reversed(before) for call in message.get("tool_calls", ()))
    name = next((call["function"]["name"] for call in calls if call["id"] == call_id), "")
    return {"role": "tool", "name": name, "tool_call_id": call_id, "content": text}


def template_call(call_id: str, name: str, arguments: str | Mapping[str, Any]) -> Message:
    """Returns a call as chat templates take it: with arguments as an object, as far as they are one."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": _arguments_of(name, arguments)}}


def _arguments_of(name: str, written: str | Mapping[str, Any]) -> str | Mapping[str, Any]:
    try:
        value = loads(written) if isinstance(written, str) else written
    except (ValueError, RecursionError):
        return without_surrogates(str(written))
    if not isinstance(value, Mapping):
        return without_surrogates(str(written))
    call = call_of({"name": name, "arguments": dict(value)})
    if call.error:
        raise bad_request(f"the arguments of a call of {name[:60]!r}: {call.error}")
    return call.arguments
