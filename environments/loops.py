"""The conversations that need no coroutine of the user's: with tools, and with an environment of the user's."""

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from environments.chat import Chat, ContextFull, ConversationOver, Step, TookTooLong, ToolCall, Turn, tool_message
from environments.messages import MAX_TEXT_BYTES, NO_CALL, TIMED_OUT, Message, without_surrogates
from environments.tools import Tool, message_of, reason_of, step_of
from rewards.returned import LARGEST, plain
from splitppo.text_fields import field_text
from splitppo.user_file import line_in

_MAX_ERROR_LENGTH = 300  # characters of an exception that are told to the model


class EnvironmentFailed(Exception):
    """Raised if code of the user's that no call of the model's made has failed, or a server's tools have changed.

    The message is a sentence.
    """


async def converse_with_tools(tools: Mapping[str, Tool], chat: Chat, row: Mapping[str, Any]) -> None:
    """Answers each turn with the results of its calls, until one has no call."""
    row = dict(row)
    of_row = {name: replace(t, function=partial(t.function, row)) if t.takes_row else t for name, t in tools.items()}
    await _converse(chat, (), lambda turn: use_tools(chat, turn, of_row))


@dataclass(frozen=True)
class Environment:
    """Conversations with an object of the user's class: the model calls its methods, or it has `step`.

    Attributes:
        create: makes the object.
        name: the class and its file, for errors.
        tools: the methods that are tools; empty for a class with `step`.
        path: the user's file that has the class; None: it is an adapter.
        asks_privileged: True if the object is asked, after `reset`, what only the critic may learn.
    """

    create: Callable[[], Any]
    name: str
    tools: Mapping[str, Tool]
    path: Path | None = None
    asks_privileged: bool = False

    async def converse(self, chat: Chat, row: Mapping[str, Any]) -> Any:
        """Talks with the model until the object or the model has ended it; returns the value of `get_reward`."""
        environment = await self._call(chat, "__init__", self.create)
        try:
            with suppress(ConversationOver, ContextFull):
                await self._talk(chat, environment, row)
            if hasattr(environment, "get_reward"):
                return await self._call(chat, "get_reward", environment.get_reward)
            return None
        finally:
            if hasattr(environment, "close"):
                await self._call(chat, "close", environment.close)

    async def _talk(self, chat: Chat, environment: Any, row: Mapping[str, Any]) -> None:
        """Begins an environment by `reset`, and answers each turn by its tools or, if it has none, by its `step`."""

        async def step(turn: Turn) -> Sequence[Message]:
            answered = await self._call(chat, "step", partial(environment.step, turn.text))
            result = self._step_of("step", answered)
            _take(chat, result)
            return () if result.done else (_user_message(result.text),)

        fields = {"seed": chat.seed, **row}
        if missing := _missing(environment.reset, fields):
            lacks = f"reset wants the field {missing!r}, which the row does not have"
            raise EnvironmentFailed(f"{self.name}: {lacks}: it has {', '.join(fields)}")
        reset = partial(environment.reset, **_taken(environment.reset, fields))
        told = await self._call(chat, "reset", reset)
        first = () if told is None else (_user_message(self._step_of("reset", told).text),)
        if self.asks_privileged and hasattr(environment, "privileged"):
            named = await self._call(chat, "privileged", environment.privileged)
            chat.pending = replace(chat.pending, privileged=self._privileged_of(named))
        await _converse(
            chat, first, (lambda turn: use_tools(chat, turn, self.tools, environment)) if self.tools else step
        )

    def _step_of(self, method: str, returned: Any) -> Step:
        """Returns what `reset` or `step` returned as a `Step`; EnvironmentFailed: it is neither a text nor a `Step`."""
        text = returned.text if isinstance(returned, Step) else returned
        if isinstance(text, str):
            return step_of(returned)
        expected = "None, a text or a Step" if method == "reset" else "a text or a Step"
        got = "a Step with the text" if isinstance(returned, Step) else f"{type(returned).__name__}:"
        value = without_surrogates(repr(text))[:100]
        raise EnvironmentFailed(f"{self.name}: {method}: expected {expected}, got {got} {value}")

    def _privileged_of(self, returned: Any) -> dict[str, str]:
        """Returns what `privileged` returned as texts by name; EnvironmentFailed: it is no mapping of such values.

        The sentence has no value, because values are for the critic alone.
        """
        expected = f"{self.name}: privileged: expected a mapping of names to texts or numbers"
        if not isinstance(returned, Mapping):
            raise EnvironmentFailed(f"{expected}, got an object of type {type(returned).__name__}")
        if not all(isinstance(name, str) for name in returned):
            raise EnvironmentFailed(f"{expected}, got one with a name that is no text")
        texts = {}
        for name, value in returned.items():
            is_scalar = isinstance(value, str | int | float) or getattr(value, "shape", None) == ()
            try:
                texts[str(name)] = without_surrogates(field_text(plain(value) if is_scalar else value))
            except ValueError as error:
                raise EnvironmentFailed(f"{self.name}: privileged: {name[:100]!r}: {error}") from error
        if sum(map(len, texts.values())) > MAX_TEXT_BYTES:
            raise EnvironmentFailed(f"{expected}, of at most {MAX_TEXT_BYTES:,} characters in all")
        return texts

    async def _call(self, chat: Chat, method: str, function: Callable[[], Any]) -> Any:
        """Calls a method of the user's environment; an error in it loses the conversation, and names its line."""
        try:
            return await chat.runner(NO_CALL, function)
        except Exception as error:
            place = line_in(self.path, error) if self.path else ""
            raise EnvironmentFailed(f"{self.name}{place}: {method}: {reason_of(error)}") from error


async def _converse(
    chat: Chat, first: Sequence[Message], answer: Callable[[Turn], Awaitable[Sequence[Message]]]
) -> None:
    """Answers each turn of the model, until there is nothing to say."""
    turn = await chat.turn(*first)
    while messages := await answer(turn):
        turn = await chat.turn(*messages)


async def use_tools(chat: Chat, turn: Turn, tools: Mapping[str, Tool], *owner: object) -> Sequence[Message]:
    """Makes the calls of a turn, one after the other; returns the replies, none if a tool has ended the conversation.

    `owner` is the object that the tools are methods of, if they are.
    """
    replies: list[Message] = []
    for number, call in enumerate(turn.calls, start=1):
        step = await _step_of_call(chat, call, number, tools, *owner)
        if step.done:
            return ()
        replies.append(tool_message(call, step.text))
    return replies


async def _step_of_call(chat: Chat, call: ToolCall, number: int, tools: Mapping[str, Tool], *owner: object) -> Step:
    """Makes one call of a turn, and returns what the model is told: the result, or what was wrong with the call.

    A call too many, one that does not fit its tool, one that takes too long and an error of the tool are told, and all
    but the first are counted. What raises EnvironmentFailed loses the whole conversation. `number` is that of the call,
    from 1.
    """
    if number > chat.max_parallel_calls:
        return Step(f"not called: at most {chat.max_parallel_calls} calls of a turn are made")
    try:
        tool, arguments = _checked(call, tools)
    except ValueError as error:
        return _counted(chat, "num_bad_calls", str(error))
    try:
        async with tool.places or nullcontext():
            step = step_of(tool.read(await chat.runner(number, partial(tool.function, *owner, **arguments))))
        _take(chat, step)
        return step
    except TookTooLong:
        chat.pending = replace(chat.pending, timed_out_calls=(*chat.pending.timed_out_calls, number))
        return _counted(chat, "num_timeouts", TIMED_OUT, tool.name)
    except EnvironmentFailed:
        raise
    except Exception as error:  # noqa: BLE001 - the user's function may raise anything
        return _counted(chat, "num_tool_errors", message_of(error)[:_MAX_ERROR_LENGTH], tool.name)


def _checked(call: ToolCall, tools: Mapping[str, Tool]) -> tuple[Tool, dict[str, Any]]:
    """Returns the tool of a call, and its arguments as the tool takes them; ValueError: it has none, or others."""
    if call.error:
        raise ValueError(call.error)
    if call.name not in tools:
        raise ValueError(f"there is no tool {call.name[:100]!r}; expected one of {', '.join(tools)}")
    return tools[call.name], tools[call.name].check(call.arguments)


def _counted(chat: Chat, counter: str, text: str, tool: str = "") -> Step:
    """Counts a call that failed, and returns what the model is told; a tool's first failure is kept for the log."""
    error = chat.pending.tool_error or (f"{tool}: {text}" if tool else "")
    chat.pending = replace(chat.pending, tool_error=error, **{counter: getattr(chat.pending, counter) + 1})
    return Step(text)


def _take(chat: Chat, step: Step) -> None:
    """Gives the reward of a step for the latest turn, and notes the numbers of its info."""
    if step.reward:
        chat.reward(step.reward)
    values = ((str(name), plain(value)) for name, value in step.info.items())
    chat.note(**{name: value for name, value in values if isinstance(value, int | float) and abs(value) <= LARGEST})


def _taken(function: Callable[..., Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields that a method takes by name; with `**row` all but `self`, which is the object."""
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return {name: value for name, value in fields.items() if name != "self"}
    return {name: value for name, value in fields.items() if name in parameters}


def _missing(function: Callable[..., Any], fields: Mapping[str, Any]) -> str:
    """Returns the first parameter that a method needs by name, and that is no field; "" if there is none."""
    parameters = inspect.signature(function).parameters.values()
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    needed = [one.name for one in parameters if one.kind in named and one.default is inspect.Parameter.empty]
    return next((name for name in needed if name not in fields), "")


def _user_message(text: str) -> Message:
    return {"role": "user", "content": text}
