"""Everything that an environment or coroutine of the user's imports: the conversation, its turns, calls of tools."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from environments.messages import MAX_TEXT_BYTES, NO_CALL, Answer, EndedBy, Message, without_surrogates
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
    """A turn of the model: its text, the calls of tools in it, and whether a limit of its length ended it."""

    text: str
    calls: tuple[ToolCall, ...]
    ended_by: EndedBy


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


def tool_message(call: ToolCall, text: object) -> Message:
    """Returns the message that tells the model the result of a call."""
    return {"role": "tool", "name": call.name, "tool_call_id": call.id, "content": str(text)}


class TookTooLong(TimeoutError):
    """Raised if code of the user's takes longer than `rollout.multi_turn.timeout_s`."""


# Runs a function, sync or async, within the time limit, and neither blocks nor ends what runs beside it. The number is
# that of a tool's call in its turn, from 1, or NO_CALL. Raises TookTooLong, ChildProcessError if the call ended its
# process when it was made before, and what the function raised.
Runner = Callable[[int, Callable[[], Any]], Awaitable[Any]]


@dataclass(eq=False)
class Chat:
    """A conversation with the model, as a coroutine `converse(chat, row)` sees it.

    Attributes:
        seed: a number for everything random; equal for all conversations about one prompt.
        max_parallel_calls: the largest number of calls of one turn that should be made.
        runner: runs functions of the user's; `run` is the easy way to it.
        has_begun: True if the coroutine has asked for a turn.
        pending: what has been given for the latest turn, and is told with the next messages.
    """

    seed: int
    max_parallel_calls: int
    runner: Runner
    _exchange: Callable[[Answer], Awaitable[Turn]]
    pending: Answer = field(default_factory=Answer)
    has_begun: bool = False

    async def turn(self, *messages: Message) -> Turn:
        """Says chat messages to the model, roles `user` and `tool`, and returns its turn.

        The first call says what follows the prompt: messages of the user, or nothing.

        Raises:
            ConversationOver: the model has no further turn, because a limit is reached.
            ValueError: a message has another role, or no text of at most 1 MiB; there is none after a turn.
        """
        if self.has_begun and not messages:
            raise ValueError("expected messages that follow the turn, got none")
        self.has_begun = True
        answer = replace(self.pending, messages=tuple(map(_checked, messages)))
        self.pending = Answer()
        return await self._exchange(answer)

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


def _checked(message: Message) -> Message:
    """Returns a message of the user's code as plain values; ValueError: its role, or no text or too long a one."""
    text = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(text, str) or message.get("role") not in ("user", "tool"):
        raise ValueError(
            f"expected messages with role 'user' or 'tool' and a text as content, got {str(message)[:200]}"
        )
    if len(text.encode("utf-8", "replace")) > MAX_TEXT_BYTES:
        raise ValueError(f"a message has {len(text):,} characters, expected a text of at most 1 MiB")
    return {**{key: plain(value) for key, value in message.items()}, "content": without_surrogates(text)}
