"""The API of chat completions (`POST /v1/chat/completions`), as OpenAI's clients speak it."""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from environments.gateway.questions import Answered, Form, Question, Refused, bad_request, canonical, unsupported
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
_IGNORED = (
    "frequency_penalty",
    "logit_bias",
    "min_p",
    "presence_penalty",
    "reasoning_effort",
    "repetition_penalty",
    "seed",
    "temperature",
    "top_k",
    "top_logprobs",
    "top_p",
    "verbosity",
)
_TEXT_PARTS = ("text", "refusal")


def read(fields: Mapping[str, Any]) -> Question:
    """Reads a request; Refused says what is wrong with it, or not supported."""
    _check_supported(fields)
    tools = tools_of(fields, _function_of, "a tool of type function")
    choice = fields.get("tool_choice")
    max_tokens_key = "max_tokens" if fields.get("max_completion_tokens") is None else "max_completion_tokens"
    return Question(
        messages=_messages_of(list_of(fields.get("messages"), "messages")),
        tools=tools,
        limits=limits_of(
            fields, max_tokens_key=max_tokens_key, stop_key="stop", with_log_probs=bool(fields.get("logprobs"))
        ),
        reads_calls=bool(tools) and choice != "none",
        ignored=ignored_in(fields, _IGNORED, choice),
    )


def _check_supported(fields: Mapping[str, Any]) -> None:
    num_choices = fields.get("n")
    if num_choices not in (None, 1):
        raise unsupported(f"n: expected 1, got {str(num_choices)[:60]}; ask again for another answer")
    response_format = fields.get("response_format")
    if response_format is not None and response_format != {"type": "text"}:
        raise unsupported("response_format: expected text, the policy samples with no grammar")
    for name in ("audio", "functions", "previous_response_id", "web_search_options"):
        if fields.get(name):
            raise unsupported(f"{name} is not supported")
    if fields.get("modalities") not in (None, ["text"]):
        raise unsupported("modalities: expected text alone")


def _function_of(tool: Mapping[str, Any]) -> Mapping[str, Any] | None:
    function = tool.get("function")
    return function if tool.get("type") == "function" and isinstance(function, dict) else None


def _messages_of(written: Sequence[Mapping[str, Any]]) -> tuple[Message, ...]:
    messages = list[Message]()
    for number, message in enumerate(written):
        messages.append(_message_of(message, f"messages[{number}]", messages))
    if not messages:
        raise bad_request("messages: expected at least one message")
    return tuple(messages)


def _message_of(message: Mapping[str, Any], where: str, before: Sequence[Message]) -> Message:
    role = message.get("role")
    text = text_of_parts(message.get("content"), _TEXT_PARTS, f"{where}, content")
    if role in ("system", "developer"):
        return system_message(text)
    if role == "user":
        return user_message(text)
    if role == "tool":
        return tool_result(text, name_of(message.get("tool_call_id"), f"{where}, tool_call_id"), before)
    if role != "assistant":
        expected = "system, developer, user, assistant or tool"
        raise bad_request(f"{where}: expected role {expected}, got {str(role)[:60]!r}")
    calls = [_call_of(call, f"{where}, tool_calls") for call in list_of(message.get("tool_calls"), where)]
    reasoning = text_of(message.get("reasoning_content"), f"{where}, reasoning_content")
    return assistant_message(text or text_of(message.get("refusal"), where), calls, reasoning)


def _call_of(call: Mapping[str, Any], where: str) -> Message:
    function = call.get("function")
    if call.get("type", "function") != "function" or not isinstance(function, dict):
        raise unsupported(f"{where}: expected calls of type function")
    arguments = text_of(function.get("arguments"), f"{where}, arguments")
    return template_call(name_of(call.get("id"), f"{where}, id"), text_of(function.get("name"), where), arguments)


def write(answered: Answered, form: Form) -> Mapping[str, Any]:
    """Returns the answer in the form that its request wants."""
    message: dict[str, Any] = {"role": "assistant", "content": answered.text, "refusal": None}
    if answered.calls:
        message["content"] = answered.text or None
        message["tool_calls"] = _calls_of(answered)
    choice = {
        "index": 0,
        "message": message,
        "logprobs": _log_probs_of(answered),
        "finish_reason": _reason_of(answered),
    }
    return {**_head(answered, form, "chat.completion"), "choices": [choice], "usage": _usage_of(answered)}


def stream(answered: Answered, form: Form) -> Iterator[bytes]:
    """Writes the answer as events: a chunk with all of it, one with its end, the usage if it is asked for."""
    usage = {"usage": None} if form.with_usage else {}

    def chunk(choices: Sequence[Mapping[str, Any]], **more: Any) -> bytes:
        head = _head(answered, form, "chat.completion.chunk")
        return b"data: " + json.dumps({**head, "choices": choices, **usage, **more}).encode() + b"\n\n"

    delta: dict[str, Any] = {"role": "assistant", "content": answered.text}
    if answered.calls:
        delta["content"] = answered.text or None
        delta["tool_calls"] = [{"index": index, **call} for index, call in enumerate(_calls_of(answered))]
    logprobs = _log_probs_of(answered)
    yield chunk([{"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": None}])
    yield chunk([{"index": 0, "delta": {}, "logprobs": None, "finish_reason": _reason_of(answered)}])
    if form.with_usage:
        yield chunk([], usage=_usage_of(answered))
    yield b"data: [DONE]\n\n"


def error(refused: Refused) -> Mapping[str, Any]:
    """Returns the body of an error, as OpenAI's APIs write it."""
    kinds = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error", 500: "server_error"}
    kind = kinds.get(refused.status, "invalid_request_error")
    return {"error": {"message": refused.sentence, "type": kind, "param": None, "code": refused.code}}


def _head(answered: Answered, form: Form, kind: str) -> Mapping[str, Any]:
    number = answered.turn.number
    return {"id": f"chatcmpl-{number:06d}", "object": kind, "created": int(time.time()), "model": form.model}


def _reason_of(answered: Answered) -> str:
    if answered.calls:
        return "tool_calls"
    return "length" if answered.is_cut else "stop"


def _calls_of(answered: Answered) -> list[Mapping[str, Any]]:
    return [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": canonical(call.arguments)}}
        for call in answered.calls
    ]


def _usage_of(answered: Answered) -> Mapping[str, int]:
    turn = answered.turn
    total = turn.num_context_tokens + turn.num_tokens
    return {"prompt_tokens": turn.num_context_tokens, "completion_tokens": turn.num_tokens, "total_tokens": total}


def _log_probs_of(answered: Answered) -> Mapping[str, Any] | None:
    if not answered.turn.log_probs:
        return None
    content = [
        {"token": token, "logprob": log_prob, "bytes": list(token.encode()), "top_logprobs": []}
        for token, log_prob in answered.turn.log_probs
    ]
    return {"content": content, "refusal": None}
