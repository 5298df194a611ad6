"""A policy for tests of what talks with a `Chat`: it says what a function of the test's says, without processes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from environments.chat import Chat, Turn
from environments.messages import Answer, EndedBy, Room
from environments.tool_calls import hermes

# What the environment says, how many turns there were -> the text of the next turn; it may raise what `Chat` raises.
Speak = Callable[[Answer, int], str]


def count(_answer: Answer, num_turns: int) -> str:
    """Says which turn it is."""
    return f"turn {num_turns + 1}"


class ScriptedPolicy:
    """Answers a `Chat` as a process does, with calls in the format hermes.

    Attributes:
        answers: all that the policy was told, in order.
        chat: the conversation.
        is_free: while this event is clear, the policy says nothing.
    """

    def __init__(self, speak: Speak = count, *, ended_by: EndedBy = "stop") -> None:
        self.answers: list[Answer] = []
        self.chat = Chat(0, 4, run_at_once, self._exchange)
        self.is_free = asyncio.Event()
        self.is_free.set()
        self._speak = speak
        self._ended_by = ended_by
        self._num_turns = 0

    async def _exchange(self, answer: Answer) -> Turn:
        self.answers.append(answer)
        await self.is_free.wait()
        text = self._speak(answer, self._num_turns)
        self._num_turns += 1
        before, calls = hermes.parse(text, ())
        numbered = tuple(replace(call, id=f"call{self._num_turns:03d}{i:02d}") for i, call in enumerate(calls))
        self.chat.pending = Answer(text=before, calls=tuple({"id": call.id} for call in numbered), num_calls=len(calls))
        return Turn(
            text,
            numbered,
            self._ended_by,
            room=Room(100, 1000),
            number=self._num_turns,
            num_context_tokens=10 * self._num_turns,
            num_tokens=len(text),
            log_probs=tuple((char, -0.5) for char in text) if answer.limits.with_log_probs else (),
        )


async def run_at_once(_call: int, function: Callable[[], Any]) -> Any:
    """Runs code of the user's in the event loop of the test; a `Runner`."""
    return function()
