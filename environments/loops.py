"""The conversations that need no coroutine of the user's: with tools, and with an environment of the user's."""

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from environments.chat import Chat, ConversationOver, Step, TookTooLong, ToolCall, Turn, tool_message
from environments.messages import NO_CALL, TIMED_OUT, Message
from environments.tools import Tool, message_of, step_of
from rewards.returned import plain

_MAX_ERROR_LENGTH = 300  # characters of an exception that are told to the model


class EnvironmentFailed(Exception):
    """Raised if code of the user's that no call of the model's made has failed; the message is a sentence."""


class Tools:
    """Conversations in which the model may call functions, until a turn has no call."""

    def __init__(self, tools: Mapping[str, Tool]) -> None:
        self._tools = tools

    async def converse(self, chat: Chat, row: Mapping[str, Any]) -> None:  # noqa: ARG002 - as a user's coroutine
        """Answers each turn with the results of its calls."""
        turn = await chat.turn()
        while turn.calls:
            replies, _ = await use_tools(chat, turn, self._tools)
            turn = await chat.turn(*replies)


class Environment:
    """Conversations with an object of the user's class: the model calls its methods, or it has `step`.

    Args:
        create: makes the object.
        name: the class and its file, for errors.
        tools: the methods that are tools; empty for a class with `step`.
        reset_takes: returns which of the fields of a row `reset` takes.
    """

    def __init__(
        self,
        create: Callable[[], Any],
        name: str,
        tools: Mapping[str, Tool],
        reset_takes: Callable[[Mapping[str, Any]], dict[str, Any]],
    ) -> None:
        self._create = create
        self._name = name
        self._tools = tools
        self._reset_takes = reset_takes

    async def converse(self, chat: Chat, row: Mapping[str, Any]) -> Any:
        """Talks with the model until the object or the model has ended it; returns the value of `get_reward`."""
        environment = await self._call(chat, "__init__", self._create)
        try:
            with suppress(ConversationOver):
                await self._talk(chat, environment, row)
            get_reward = getattr(environment, "get_reward", None)
            return None if get_reward is None else await self._call(chat, "get_reward", get_reward)
        finally:
            if (close := getattr(environment, "close", None)) is not None:
                await self._call(chat, "close", close)

    async def _talk(self, chat: Chat, environment: Any, row: Mapping[str, Any]) -> None:
        reset = partial(environment.reset, **self._reset_takes({"seed": chat.seed, **row}))
        told = await self._call(chat, "reset", reset, lambda value: None if value is None else step_of(value).text)
        turn = await chat.turn(*(() if told is None else [_user_message(told)]))
        if self._tools:
            while turn.calls:
                replies, is_over = await use_tools(chat, turn, self._tools, environment)
                if is_over:
                    return
                turn = await chat.turn(*replies)
            return
        while True:
            step: Step = await self._call(chat, "step", partial(environment.step, turn.text), step_of)
            _take(chat, step)
            if step.done:
                return
            turn = await chat.turn(_user_message(step.text))

    async def _call(
        self, chat: Chat, method: str, function: Callable[[], Any], then: Callable[[Any], Any] = lambda value: value
    ) -> Any:
        try:
            return await chat.runner(NO_CALL, function, then)
        except Exception as error:
            raise EnvironmentFailed(f"{self._name}: {method}: {type(error).__name__}: {message_of(error)}") from error


async def use_tools(chat: Chat, turn: Turn, tools: Mapping[str, Tool], *owner: object) -> tuple[list[Message], bool]:
    """Makes the calls of a turn, one after the other; returns the replies, and True if a tool has ended it all.

    `owner` is the object that the tools are methods of, if they are.
    """
    replies: list[Message] = []
    for number, call in enumerate(turn.calls, start=1):
        step = await _step_of_call(chat, call, number, tools, *owner)
        _take(chat, step)
        replies.append(tool_message(call, step.text))
        if step.done:
            return replies, True
    return replies, False


async def _step_of_call(chat: Chat, call: ToolCall, number: int, tools: Mapping[str, Tool], *owner: object) -> Step:
    if number > chat.max_parallel_calls:
        return Step(f"not called: at most {chat.max_parallel_calls} calls of a turn are made")
    try:
        tool, arguments = _checked(call, tools)
    except ValueError as error:
        return _counted(chat, "num_bad_calls", str(error))
    try:
        step: Step = await chat.runner(number, partial(tool.function, *owner, **arguments), step_of)
    except TookTooLong:
        chat.pending = replace(chat.pending, timed_out_calls=(*chat.pending.timed_out_calls, number))
        return _counted(chat, "num_timeouts", TIMED_OUT)
    except Exception as error:  # noqa: BLE001 - the user's function may raise anything
        return _counted(chat, "num_tool_errors", message_of(error)[:_MAX_ERROR_LENGTH])
    return step


def _checked(call: ToolCall, tools: Mapping[str, Tool]) -> tuple[Tool, dict[str, Any]]:
    """Returns the tool of a call, and its arguments as the tool takes them; ValueError: it has none, or others."""
    if call.error:
        raise ValueError(call.error)
    if call.name not in tools:
        raise ValueError(f"there is no tool {call.name[:100]!r}; expected one of {', '.join(tools)}")
    return tools[call.name], tools[call.name].check(call.arguments)


def _counted(chat: Chat, counter: str, text: str) -> Step:
    chat.pending = replace(chat.pending, **{counter: getattr(chat.pending, counter) + 1})
    return Step(text)


def _take(chat: Chat, step: Step) -> None:
    """Gives the reward of a step for the latest turn, and notes the numbers of its info."""
    if step.reward:
        chat.reward(step.reward)
    values = ((str(name), plain(value)) for name, value in step.info.items())
    chat.note(**{name: value for name, value in values if isinstance(value, int | float) and math.isfinite(value)})


def _user_message(text: str) -> Message:
    return {"role": "user", "content": text}
