"""The API of responses (`POST /v1/responses`), as OpenAI's clients speak it: a translation of the same questions.

Nothing is stored: each request has its whole history, as it has with `store: false`.
"""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from environments.gateway.chat_completions import error
from environments.gateway.questions import Answered, Form, Question, bad_request, canonical, unsupported
from environments.gateway.request_fields import (
    ignored_in,
    limits_of,
    list_of,
    name_of,
    text_of,
    text_of_parts,
    tools_of,
)
from environments.gateway.template_messages import (
    assistant_message,
    system_message,
    template_call,
    tool_result,
    user_message,
)
from environments.messages import Message

__all__ = ["error", "read", "stream", "write"]

# Parameters that are the run's own, or that change nothing here.
_IGNORED = ("max_tool_calls", "reasoning", "temperature", "top_logprobs", "top_p", "truncation")
_TEXT_PARTS = ("input_text", "output_text", "text", "refusal")


def read(fields: Mapping[str, Any]) -> Question:
    """Reads a request; Refused says what is wrong with it, or not supported."""
    for name in ("background", "conversation", "previous_response_id", "prompt"):
        if fields.get(name):
            raise unsupported(f"{name} is not supported: nothing is stored, send the whole history as input")
    text = fields.get("text")
    text_format = text.get("format") if isinstance(text, dict) else None
    if text_format is not None and text_format != {"type": "text"}:
        raise unsupported("text.format: expected text, the policy samples with no grammar")
    tools = tools_of(fields, _function_of, "a tool of type function")
    choice = fields.get("tool_choice")
    return Question(
        messages=_messages_of(fields),
        tools=tools,
        limits=limits_of(fields, max_tokens_key="max_output_tokens"),
        reads_calls=bool(tools) and choice != "none",
        ignored=ignored_in(fields, _IGNORED, choice),
    )


def _function_of(tool: Mapping[str, Any]) -> Mapping[str, Any] | None:
    return tool if tool.get("type") == "function" else None


def _messages_of(fields: Mapping[str, Any]) -> tuple[Message, ...]:
    instructions = text_of(fields.get("instructions"), "instructions")
    messages: list[Message] = [system_message(instructions)] if instructions else []
    asked = fields.get("input")
    items = [{"role": "user", "content": asked}] if isinstance(asked, str) else list_of(asked, "input")
    for number, item in enumerate(items):
        _add(messages, item, f"input[{number}]")
    if not items:
        raise bad_request("input: expected a text, or a list with at least one item")
    return tuple(messages)


def _add(messages: list[Message], item: Mapping[str, Any], where: str) -> None:
    """Adds an item of the input; a call belongs to the message of the assistant before it."""
    kind = item.get("type", "message")
    if kind == "message":
        messages.append(_message_of(item, where))
    elif kind == "function_call":
        call = template_call(
            name_of(item.get("call_id"), f"{where}, call_id"),
            text_of(item.get("name"), f"{where}, name"),
            text_of(item.get("arguments"), f"{where}, arguments"),
        )
        begun = messages.pop() if messages and messages[-1]["role"] == "assistant" else assistant_message("")
        messages.append({**begun, "tool_calls": [*begun.get("tool_calls", ()), call]})
    elif kind == "function_call_output":
        text = text_of_parts(item.get("output"), _TEXT_PARTS, f"{where}, output")
        messages.append(tool_result(text, name_of(item.get("call_id"), f"{where}, call_id"), messages))
    elif kind != "reasoning":
        expected = "message, function_call, function_call_output or reasoning"
        raise unsupported(f"{where}: expected an item of type {expected}, got {str(kind)[:60]!r}")


def _message_of(item: Mapping[str, Any], where: str) -> Message:
    role = item.get("role")
    text = text_of_parts(item.get("content"), _TEXT_PARTS, f"{where}, content")
    if role in ("system", "developer"):
        return system_message(text)
    if role == "user":
        return user_message(text)
    if role == "assistant":
        return assistant_message(text)
    raise bad_request(f"{where}: expected role system, developer, user or assistant, got {str(role)[:60]!r}")


def write(answered: Answered, form: Form) -> Mapping[str, Any]:
    """Returns the answer in the form that its request wants."""
    turn = answered.turn
    return {
        **_begun(answered, form),
        "status": "incomplete" if answered.is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if answered.is_cut else None,
        "output": _items_of(answered),
        "usage": {
            "input_tokens": turn.num_context_tokens,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": turn.num_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": turn.num_context_tokens + turn.num_tokens,
        },
    }


def stream(answered: Answered, form: Form) -> Iterator[bytes]:
    """Writes the answer as events: each item with its content at once."""
    whole = write(answered, form)
    begun = {**_begun(answered, form), "status": "in_progress", "output": [], "usage": None}
    events: list[Mapping[str, Any]] = [
        {"type": "response.created", "response": begun},
        {"type": "response.in_progress", "response": begun},
    ]
    for index, item in enumerate(whole["output"]):
        events += _events_of(item, index)
    events.append({"type": f"response.{whole['status']}", "response": whole})
    for number, event in enumerate(events):
        numbered = json.dumps({**event, "sequence_number": number})
        yield f"event: {event['type']}\ndata: {numbered}\n\n".encode()


def _events_of(item: Mapping[str, Any], index: int) -> Sequence[Mapping[str, Any]]:
    """Returns the events of one item of the output."""
    of_item = {"item_id": item["id"], "output_index": index}
    done = {"type": "response.output_item.done", "output_index": index, "item": item}
    added = {"type": "response.output_item.added", "output_index": index}
    if item["type"] == "function_call":
        arguments = item["arguments"]
        return [
            {**added, "item": {**item, "arguments": "", "status": "in_progress"}},
            {"type": "response.function_call_arguments.delta", **of_item, "delta": arguments},
            {
                "type": "response.function_call_arguments.done",
                **of_item,
                "name": item["name"],
                "arguments": arguments,
            },
            done,
        ]
    [part] = item["content"]
    of_part = {**of_item, "content_index": 0}
    return [
        {**added, "item": {**item, "content": [], "status": "in_progress"}},
        {"type": "response.content_part.added", **of_part, "part": {**part, "text": ""}},
        {"type": "response.output_text.delta", **of_part, "delta": part["text"], "logprobs": []},
        {"type": "response.output_text.done", **of_part, "text": part["text"], "logprobs": []},
        {"type": "response.content_part.done", **of_part, "part": part},
        done,
    ]


def _begun(answered: Answered, form: Form) -> Mapping[str, Any]:
    return {
        "id": f"resp_{answered.turn.number:06d}",
        "object": "response",
        "created_at": int(time.time()),
        "model": form.model,
        "error": None,
        "incomplete_details": None,
        "instructions": form.instructions,
        "max_output_tokens": form.max_output_tokens,
        "metadata": {},
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "store": False,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "truncation": "disabled",
    }


def _items_of(answered: Answered) -> list[Mapping[str, Any]]:
    number = f"{answered.turn.number:06d}"
    status = "incomplete" if answered.is_cut else "completed"
    calls = [
        {
            "type": "function_call",
            "id": f"fc_{call.id}",
            "call_id": call.id,
            "name": call.name,
            "arguments": canonical(call.arguments),
            "status": "completed",
        }
        for call in answered.calls
    ]
    part = {"type": "output_text", "text": answered.text, "annotations": [], "logprobs": []}
    message = {"type": "message", "id": f"msg_{number}", "role": "assistant", "status": status, "content": [part]}
    return [*([message] if answered.text or not calls else []), *calls]
