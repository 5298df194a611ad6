"""Questions to the policy, whatever API they were written for, and what comes of them: an answer or a refusal."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from environments.chat import ToolCall, Turn
from environments.messages import MAX_TEXT_BYTES, Message, Schemas, TurnLimits, without_surrogates
from environments.tool_calls.json_calls import call_of, is_deep, loads

MODEL = "policy"  # the name of the policy for programs; any other one will do
_MAX_DEPTH = 64  # of a tool's schema
_MAX_STOPS = 16  # as the protocol of the groups has it
_MAX_NAME_LENGTH = 200  # characters of the names and ids of tools and calls


@dataclass(eq=False)
class Refused(Exception):
    """Raised for a request that gets no answer: an HTTP status, a code, and one sentence."""

    status: int
    code: str
    sentence: str

    def __str__(self) -> str:
        return self.sentence


@dataclass(frozen=True)
class Question:
    """A question to the policy, as a request asks it.

    Attributes:
        messages: the whole history, as a chat template takes it; roles system, user, assistant and tool.
        tools: JSON schemas of the tools that the policy may call.
        limits: the limits of the turn.
        reads_calls: True if calls of tools are wanted; else they are text.
        ignored: names of parameters that the request sets, and that change nothing here.
    """

    messages: tuple[Message, ...]
    tools: Schemas = ()
    limits: TurnLimits = field(default_factory=TurnLimits)
    reads_calls: bool = False
    ignored: tuple[str, ...] = ()

    @cached_property
    def prefixes(self) -> tuple[bytes, ...]:
        """A digest of the tools with the first 0, 1, ... messages: equal for equal histories.

        A message is its role, its text, its calls with their ids and with arguments as canonical JSON, and the id of
        the call that it answers. What is missing, null or empty is alike; all else of a message does not count.
        """
        digests = [hashlib.sha256(canonical(list(self.tools)).encode()).digest()]
        for message in self.messages:
            digests.append(_digest(digests[-1], message))
        return tuple(digests)

    @property
    def key(self) -> bytes:
        """A digest of tools, messages and limits, which a repeat of the request has, too."""
        limits = self.limits
        asked = canonical([limits.max_tokens, limits.stop, limits.with_log_probs, self.reads_calls])
        return hashlib.sha256(self.prefixes[-1] + asked.encode()).digest()

    def followed_by(self, message: Message) -> "Question":
        """Returns the question with one message more."""
        longer = replace(self, messages=(*self.messages, message))
        longer.__dict__["prefixes"] = (*self.prefixes, _digest(self.prefixes[-1], message))
        return longer


@dataclass(frozen=True)
class Answered:
    """The policy's answer to a question.

    Attributes:
        turn: the turn of the policy.
        text: what the program is told of it: without the calls, and up to a stop text of the request.
        calls: the calls that the program is told of.
        stop: the stop text of the request that ended the turn; None: none did.
    """

    turn: Turn
    text: str
    calls: tuple[ToolCall, ...] = ()
    stop: str | None = None

    @property
    def is_cut(self) -> bool:
        """True if a limit of the length ended the turn."""
        return self.stop is None and not self.calls and self.turn.ended_by != "stop"


Outcome = Answered | Refused


def bad_request(sentence: str) -> Refused:
    """Returns the refusal of a request that is written wrongly."""
    return Refused(400, "invalid_request", sentence)


def unsupported(sentence: str) -> Refused:
    """Returns the refusal of a request for something that the endpoint has not."""
    return Refused(422, "unsupported", sentence)


def object_of(body: bytes) -> Mapping[str, Any]:
    """Reads the JSON object of a request's body."""
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise bad_request(f"expected a JSON object as body, got what is no JSON ({error})") from error
    if not isinstance(fields, dict):
        raise bad_request(f"expected a JSON object as body, got {_kind_of(fields)}")
    return fields


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


def tool_schema(fields: Mapping[str, Any], where: str) -> Mapping[str, Any]:
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
    try:
        canonical(parameters).encode()
    except UnicodeEncodeError as error:
        raise bad_request(f"{where}: its parameters have half of a character") from error
    return {"type": "function", "function": function}


def _object_or_empty(value: Any, where: str) -> Mapping[str, Any]:
    if value is not None and not isinstance(value, dict):
        raise bad_request(f"{where}: expected an object as parameters, got {_kind_of(value)}")
    return value or {}


def limits_of(
    max_tokens: Any, stop: Any, *, max_tokens_key: str, stop_key: str, with_log_probs: bool = False
) -> TurnLimits:
    """Returns the limits that a request sets; None: none."""
    if max_tokens is not None and (not isinstance(max_tokens, int) or isinstance(max_tokens, bool) or max_tokens < 1):
        raise bad_request(f"{max_tokens_key}: expected an integer of at least 1, got {str(max_tokens)[:60]}")
    stops = [stop] if isinstance(stop, str) else stop or []
    if not isinstance(stops, list) or len(stops) > _MAX_STOPS:
        raise bad_request(f"{stop_key}: expected at most {_MAX_STOPS} texts")
    texts = tuple(name_of(one, stop_key) for one in stops)
    largest = 2**31 - 1  # on the wire
    return TurnLimits(None if max_tokens is None else min(max_tokens, largest), texts, with_log_probs)


def set_parameters(fields: Mapping[str, Any], names: Sequence[str]) -> tuple[str, ...]:
    """Returns which of these parameters a request sets."""
    return tuple(name for name in names if fields.get(name) is not None)


def model_of(fields: Mapping[str, Any]) -> str:
    """Returns the name of the model that a request asks for: any will do."""
    model = fields.get("model")
    return model if isinstance(model, str) else MODEL


def canonical(value: Any) -> str:
    """Returns JSON that is the same for equal values."""
    return json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"))


def _digest(before: bytes, message: Message) -> bytes:
    calls = [[call["id"], call["function"]] for call in message.get("tool_calls", ())]
    normal = [message["role"], message["content"], calls, message.get("tool_call_id", "")]
    return hashlib.sha256(before + canonical(normal).encode()).digest()


def _kind_of(value: Any) -> str:
    names: Mapping[type, str] = {dict: "an object", list: "a list", str: "a text", type(None): "null"}
    return names.get(type(value), str(value)[:60])
