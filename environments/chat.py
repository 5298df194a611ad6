"""Everything that an environment or coroutine of the user's imports: the conversation, its turns, calls of tools."""

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from environments.messages import (
    MAX_TEXT_BYTES,
    NO_CALL,
    Answer,
    EndedBy,
    Message,
    Room,
    Schemas,
    TurnLimits,
    without_surrogates,
)
from rewards.returned import finite_number, plain


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool that the model wrote; `error`, if not empty, says why what it wrote is none."""

    name: str
    arguments: Mapping[str, Any]
    id: str = ""
    error: str = ""


@dataclass(frozen=True)
class Turn:
    """A turn of the model.

    Attributes:
        text: what the model said.
        calls: the calls of tools in it.
        ended_by: "stop", the model itself or a stop text; "length", a limit of its length; "context", the end of its
            context.
        room: the tokens that are left in its context, and in the response with all of its contexts; None where nobody
            has counted them, as in a test of yours.
        number: the number of the turn in the conversation, from 1.
        num_context_tokens: the tokens that the model saw when the turn began.
        num_tokens: the tokens of the turn.
        log_probs: the text of each token and its log-prob in nats, if they were asked for.
    """

    text: str
    calls: tuple[ToolCall, ...]
    ended_by: EndedBy
    room: Room | None = None
    number: int = 0
    num_context_tokens: int = 0
    num_tokens: int = 0
    log_probs: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class Step:
    """An environment's answer to a turn or a call: a text, a reward for the turn, and whether the conversation is over.

    Numbers in `info` become notes.
    """

    text: str = ""
    reward: float = 0.0
    done: bool = False
    info: Mapping[str, Any] = field(default_factory=dict)


class ConversationOver(BaseException):
    """Raised by `Chat.turn` if the model has no further turn; no Exception, so that `except Exception` lets it pass."""


class ContextFull(Exception):
    """Raised if messages, and one token more, do not fit into the context. Nothing was said: a `restart` may follow."""


def tool_message(call: ToolCall, text: object) -> Message:
    """Returns the message that tells the model the result of a call."""
    return {"role": "tool", "name": call.name, "tool_call_id": call.id, "content": str(text)}


class TookTooLong(TimeoutError):
    """Raised if code of the user's takes longer than `rollout.multi_turn.timeout_s`."""


# Runs a function, sync or async, within the time limit, and neither blocks nor ends what runs beside it. The number is
# that of a tool's call in its turn, from 1, or NO_CALL. Raises TookTooLong, ChildProcessError if the call ended its
# process when it was made before, and what the function raised.
Runner = Callable[[int, Callable[[], Any]], Awaitable[Any]]


REPLYING_ROLES = ("user", "tool")  # of messages that follow a turn
_OF_CONTEXT = ("system", "user", "assistant", "tool")  # roles of a context that begins anew
_NO_LIMITS = TurnLimits()
_MAX_DEPTH = 100  # of mappings and lists in messages and schemas


@dataclass(eq=False)
class Chat:
    """A conversation with the model, as a coroutine `converse(chat, row)` sees it.

    Attributes:
        seed: a number for everything random; equal for all conversations about one prompt.
        max_parallel_calls: the largest number of calls of one turn that should be made.
        runner: runs functions of the user's; `run` is the easy way to it.
        has_begun: True if the coroutine has asked for a turn.
        around: surrounds each question to the model, from when it is asked until it is answered.
        pending: what has been given for the latest turn, and is told with the next messages.
        hurry: gives code of the user's that runs so many seconds more, if it has not fewer left.
        told: what the model was told before, if the conversation is repeated after the loss of its process.
    """

    seed: int
    max_parallel_calls: int
    runner: Runner
    _exchange: Callable[[Answer], Awaitable[Turn]]
    pending: Answer = field(default_factory=Answer)
    has_begun: bool = False
    around: Callable[[], AbstractAsyncContextManager[None]] = nullcontext
    hurry: Callable[[float], None] = lambda _limit_s: None
    told: Sequence[Answer] = ()
    _num_turns: int = 0

    async def turn(self, *messages: Message, after: Turn | None = None, limits: TurnLimits = _NO_LIMITS) -> Turn:
        """Says chat messages to the model, roles `user` and `tool`, and returns its turn.

        The first call says what follows the prompt: messages of the user, or nothing. With `after`, an earlier turn,
        the messages follow that turn instead of the latest: the model sees the tokens up to it, and nothing later.

        Raises:
            ConversationOver: the model has no further turn, because a limit is reached.
            ContextFull: the messages do not fit into the context; nothing was said.
            ValueError: a message has another role, or no text of at most 1 MiB; there is none after a turn; `after` is
                no turn of this conversation.
        """
        if self.has_begun and not messages:
            raise ValueError("expected messages that follow the turn, got none")
        if after is not None and not 1 <= after.number <= self._num_turns:
            raise ValueError(f"after: expected a turn from 1 to {self._num_turns} of this one, got {after.number}")
        told = tuple(map(_checked_reply, messages))
        return await self._ask(messages=told, after_turn=None if after is None else after.number, limits=limits)

    async def restart(self, *messages: Message, tools: Schemas | None = None, limits: TurnLimits = _NO_LIMITS) -> Turn:
        """Begins a context anew with these messages, after which the model sees nothing that was before.

        They are a whole conversation, as the chat template writes it: roles `system`, `user`, `assistant`, `tool`. What
        they say for the assistant is context and is not learned from. `tools` are JSON schemas, by which the calls of
        turns in this context are read; None: those of the environment; (): none, and no call is read. As the first call
        it replaces the prompt. Returns the model's turn.

        Raises:
            ConversationOver, ContextFull: as in `turn`.
            ValueError: a message has another role, or no text; messages or tools take more than 1 MiB in all; a tool is
                no JSON schema of a function; there are no messages.
        """
        if not messages:
            raise ValueError("expected the messages of a context, got none")
        told = tuple(map(_checked_of_context, messages))
        schemas = None if tools is None else tuple(map(_checked_schema, tools))
        _check_length(told, "messages")
        _check_length(schemas, "tools")
        return await self._ask(messages=told, begins_context=True, tools=schemas, limits=limits)

    async def _ask(self, **answer: Any) -> Turn:
        """Gives the model what is pending with this answer, and returns its next turn."""
        self.has_begun = True
        told = replace(self.pending, **answer)
        self.pending = Answer()
        async with self.around():
            turn = await self._exchange(told)
        self._num_turns += 1
        return turn

    def reward(self, reward: float) -> None:
        """Gives a reward for the latest turn, on its last token; several of them add up."""
        reward = finite_number(reward, "a number as reward", "the environment")
        self.pending = replace(self.pending, reward=(self.pending.reward or 0.0) + reward)

    def note(self, /, **numbers: float) -> None:
        """Keeps numbers for the metrics."""
        notes = {
            name: finite_number(value, f"a number as {name}", "the environment") for name, value in numbers.items()
        }
        self.pending = replace(self.pending, notes={**self.pending.notes, **notes})

    async def run(self, function: Callable[..., Any], /, *arguments: Any, **named: Any) -> Any:
        """Calls a function of yours, sync or async, so that it blocks no other conversation, and returns its value.

        Raises:
            TookTooLong: it took longer than `rollout.multi_turn.timeout_s`.
        """
        return await self.runner(NO_CALL, partial(function, *arguments, **named))


def _checked_reply(message: Message) -> Message:
    """Returns a message that follows a turn, as plain values.

    Raises:
        ValueError: another role, or no text of at most 1 MiB.
    """
    _check_text(message, REPLYING_ROLES)
    plain_values = {key: plain(value) for key, value in message.items()}
    return {**plain_values, "content": without_surrogates(message["content"])}


def _checked_of_context(message: Message) -> Message:
    """Returns a message of a context as plain values; a message that calls tools needs no text.

    Raises:
        ValueError: another role, no text of at most 1 MiB, or calls of another form than a chat template's.
    """
    calls = message.get("tool_calls") if isinstance(message, Mapping) else None
    if calls:
        message = {**message, "content": message.get("content") or ""}
        if not isinstance(calls, list | tuple) or not all(map(_names_function, calls)):
            expected = "a list of {'type': 'function', 'function': {'name': ..., 'arguments': ...}}"
            raise ValueError(f"expected tool_calls as {expected}, got {str(calls)[:200]}")
    _check_text(message, _OF_CONTEXT)
    checked: Message = _plain_values(message)
    return checked


def _names_function(value: Any) -> bool:
    """Returns whether a call, or the schema of a tool, has a function with a name."""
    function = value.get("function") if isinstance(value, Mapping) else None
    return isinstance(function, Mapping) and isinstance(function.get("name"), str) and bool(function["name"])


def _checked_schema(schema: Any) -> Mapping[str, Any]:
    """Returns the JSON schema of a tool as plain values; ValueError: it is none of a function."""
    if not _names_function(schema):
        expected = "tools as JSON schemas, {'type': 'function', 'function': {'name': ...}}"
        raise ValueError(f"expected {expected}, got {str(schema)[:200]}")
    checked: Mapping[str, Any] = _plain_values(schema)
    return checked


def _check_text(message: Message, roles: Sequence[str]) -> None:
    """Checks the role of a message and its text; ValueError: it has another role, or no text or too long a one."""
    text = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(text, str) or message.get("role") not in roles:
        expected = " or ".join(map(repr, roles))
        raise ValueError(f"expected messages with role {expected} and a text as content, got {str(message)[:200]}")
    if len(text.encode("utf-8", "replace")) > MAX_TEXT_BYTES:
        raise ValueError(f"a message has {len(text):,} characters, expected a text of at most 1 MiB")


def _check_length(values: object, name: str) -> None:
    """Checks what the messages or tools of a context take together, as JSON; ValueError: more than 1 MiB."""
    num_bytes = len(json.dumps(values, ensure_ascii=False).encode())
    if num_bytes > MAX_TEXT_BYTES:
        raise ValueError(f"the {name} of a context have {num_bytes:,} bytes, expected at most 1 MiB in all")


def _plain_values(value: Any, depth: int = 0) -> Any:
    """Returns mappings and lists of plain values, at any depth, with texts that UTF-8 can encode.

    Raises:
        ValueError: they lie in each other more than 100 deep.
    """
    if depth > _MAX_DEPTH:
        raise ValueError(f"mappings and lists lie in each other more than {_MAX_DEPTH} deep")
    if isinstance(value, Mapping):
        return {without_surrogates(str(key)): _plain_values(each, depth + 1) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain_values(each, depth + 1) for each in value]
    value = plain(value)
    return without_surrogates(value) if isinstance(value, str) else value
