"""The API of messages (`POST /v1/messages`), as Anthropic's clients speak it: a translation of the same questions."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from environments.gateway.questions import Answered, Form, Question, Refused, bad_request, unsupported
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

# Parameters that are the run's own, or that change nothing here.
_IGNORED = ("context_management", "effort", "output_config", "temperature", "thinking", "top_k", "top_p")
_THOUGHTS = ("thinking", "redacted_thinking")  # blocks of the assistant that do not count
_ERRORS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
}


def read(fields: Mapping[str, Any]) -> Question:
    """Reads a request; Refused says what is wrong with it, or not supported."""
    for name in ("container", "mcp_servers", "output_format"):
        if fields.get(name):
            raise unsupported(f"{name} is not supported")
    config = fields.get("output_config")
    if isinstance(config, dict) and config.get("format") is not None:
        raise unsupported("output_config.format is not supported: the policy samples with no grammar")
    tools = tools_of(fields, _function_of, "a tool of the program's, with input_schema")
    choice = fields.get("tool_choice")
    kind = choice.get("type") if isinstance(choice, dict) else choice
    return Question(
        messages=_messages_of(fields),
        tools=tools,
        limits=limits_of(fields, max_tokens_key="max_tokens", stop_key="stop_sequences"),
        reads_calls=bool(tools) and kind != "none",
        ignored=ignored_in(fields, _IGNORED, kind),
    )


def _function_of(tool: Mapping[str, Any]) -> Mapping[str, Any] | None:
    schema = tool.get("input_schema")
    is_of_program = tool.get("type") in ("custom", None)
    return {**tool, "parameters": schema} if is_of_program and isinstance(schema, dict) else None


def _messages_of(fields: Mapping[str, Any]) -> tuple[Message, ...]:
    system = text_of_parts(fields.get("system"), ("text",), "system")
    messages: list[Message] = [system_message(system)] if system else []
    written = list_of(fields.get("messages"), "messages")
    if not written:
        raise bad_request("messages: expected at least one message")
    if written[-1].get("role") == "assistant":
        raise unsupported("messages: the last one is the assistant's; answers that are begun are not supported")
    for number, message in enumerate(written):
        where = f"messages[{number}]"
        role = message.get("role")
        content = message.get("content")
        blocks = list_of(content, f"{where}, content") if isinstance(content, list) else _text_block(content, where)
        if role == "user":
            _add_of_user(messages, blocks, where)
        elif role == "assistant":
            messages.append(_of_assistant(blocks, where))
        else:
            raise bad_request(f"{where}: expected role user or assistant, got {str(role)[:60]!r}")
    return tuple(messages)


def _text_block(content: Any, where: str) -> Sequence[Mapping[str, Any]]:
    return [{"type": "text", "text": text_of(content, f"{where}, content")}]


def _add_of_user(messages: list[Message], blocks: Sequence[Mapping[str, Any]], where: str) -> None:
    """Adds a message of the user: results of tools are messages of their own, texts between them are joined."""
    texts: list[str] = []
    for block in blocks:
        if block.get("type") != "tool_result":
            texts.append(text_of_parts([block], ("text",), where))
            continue
        if texts:
            messages.append(user_message("".join(texts)))
            texts = []
        text = text_of_parts(block.get("content"), ("text",), f"{where}, tool_result")
        messages.append(tool_result(text, name_of(block.get("tool_use_id"), f"{where}, tool_use_id"), messages))
    if texts or not blocks:
        messages.append(user_message("".join(texts)))


def _of_assistant(blocks: Sequence[Mapping[str, Any]], where: str) -> Message:
    texts = []
    calls = []
    for block in blocks:
        kind = block.get("type")
        if kind == "tool_use":
            called = block.get("input")
            arguments = called if isinstance(called, dict) else {}
            calls.append(template_call(name_of(block.get("id"), where), text_of(block.get("name"), where), arguments))
        elif kind not in _THOUGHTS:
            texts.append(text_of_parts([block], ("text",), where))
    return assistant_message("".join(texts), calls)


def write(answered: Answered, form: Form) -> Mapping[str, Any]:
    """Returns the answer in the form that its request wants."""
    usage = {"input_tokens": answered.turn.num_context_tokens, "output_tokens": answered.turn.num_tokens}
    return {
        "id": f"msg_{answered.turn.number:06d}",
        "type": "message",
        "role": "assistant",
        "model": form.model,
        "content": _blocks_of(answered),
        "stop_reason": _reason_of(answered),
        "stop_sequence": answered.stop,
        "usage": usage,
    }


def stream(answered: Answered, form: Form) -> Iterator[bytes]:
    """Writes the answer as events: each block with its content at once."""
    whole = write(answered, form)
    begin = {**whole, "content": [], "stop_reason": None, "stop_sequence": None}
    yield _event("message_start", message={**begin, "usage": {**whole["usage"], "output_tokens": 0}})
    for index, block in enumerate(whole["content"]):
        if block["type"] == "text":
            empty: Mapping[str, Any] = {"type": "text", "text": ""}
            delta = {"type": "text_delta", "text": block["text"]}
        else:
            empty = {**block, "input": {}}
            delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
        yield _event("content_block_start", index=index, content_block=empty)
        yield _event("content_block_delta", index=index, delta=delta)
        yield _event("content_block_stop", index=index)
    end = {"stop_reason": whole["stop_reason"], "stop_sequence": whole["stop_sequence"]}
    yield _event("message_delta", delta=end, usage={"output_tokens": whole["usage"]["output_tokens"]})
    yield _event("message_stop")


def error(refused: Refused) -> Mapping[str, Any]:
    """Returns the body of an error, as Anthropic's API writes it."""
    kind = _ERRORS.get(refused.status, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": refused.sentence}}


def _event(kind: str, **fields: Any) -> bytes:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n".encode()


def _blocks_of(answered: Answered) -> list[Mapping[str, Any]]:
    calls = [{"type": "tool_use", "id": call.id, "name": call.name, "input": call.arguments} for call in answered.calls]
    texts = [{"type": "text", "text": answered.text}] if answered.text or not calls else []
    return [*texts, *calls]


def _reason_of(answered: Answered) -> str:
    if answered.calls:
        return "tool_use"
    if answered.stop is not None:
        return "stop_sequence"
    return "max_tokens" if answered.is_cut else "end_turn"
