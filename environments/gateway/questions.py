"""Questions to the policy, whatever API they were written for, and what comes of them: an answer or a refusal."""

import hashlib
import json
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from environments.chat import ToolCall, Turn
from environments.messages import Message, Schemas, TurnLimits

MODEL = "policy"  # the name of the policy for programs; any other one will do


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
        num_bytes: the bytes of the request.
    """

    messages: tuple[Message, ...]
    tools: Schemas = ()
    limits: TurnLimits = field(default_factory=TurnLimits)
    reads_calls: bool = False
    ignored: tuple[str, ...] = ()
    num_bytes: int = 0

    @cached_property
    def prefixes(self) -> tuple[bytes, ...]:
        """A digest of the tools with the first 0, 1, ... messages: equal for equal histories.

        A message is its role, its text, its calls with their ids and with arguments as canonical JSON, and the id of
        the call that it answers. What is missing, null or empty is alike; all else of a message does not count.
        """
        digests = [hashlib.sha256(canonical(list(self.tools)).encode()).digest()]
        for message in self.messages:
            digests.append(digest_with(digests[-1], message))
        return tuple(digests)

    @property
    def key(self) -> bytes:
        """A digest of tools, messages and limits, which a repeat of the request has, too."""
        limits = self.limits
        asked = canonical([limits.max_tokens, limits.stop, limits.with_log_probs, self.reads_calls])
        return hashlib.sha256(self.prefixes[-1] + asked.encode()).digest()


@dataclass(frozen=True)
class Form:
    """The form in which a request wants its answer, with some fields that are only said again there.

    Attributes:
        model: the name that the request has for the policy.
        is_stream: True if the answer is written as events.
        with_usage: True if events of chat completions end with the usage.
        instructions, max_output_tokens: see the API of responses.
    """

    model: str = MODEL
    is_stream: bool = False
    with_usage: bool = False
    instructions: str | None = None
    max_output_tokens: int | None = None


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


def canonical(value: Any) -> str:
    """Returns JSON that is the same for equal values."""
    return json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"))


def digest_with(before: bytes, message: Message) -> bytes:
    """Returns the digest of a history with one message more, see `Question.prefixes`; `before` is that without it."""
    calls = [[call["id"], call["function"]] for call in message.get("tool_calls", ())]
    normal = [message["role"], message["content"], calls, message.get("tool_call_id", "")]
    return hashlib.sha256(before + canonical(normal).encode()).digest()
