"""A conversation without a model: what a coroutine asks for is answered by scripted turns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

from environments.chat import Chat, ConversationOver, Turn
from environments.messages import Answer


class ScriptedChat(Chat):
    """Says one turn after the other; after the last one the conversation is over.

    `answers` has what the coroutine told it. A turn may be a function of the answer that asks for it.
    """

    def __init__(self, turns: Iterable[Turn | Callable[[Answer], Turn]], *, seed: int = 0) -> None:
        self.answers: list[Answer] = []
        self._script: Iterator[Turn | Callable[[Answer], Turn]] = iter(turns)
        super().__init__(seed, 1, self._run, self._say)

    async def _say(self, answer: Answer) -> Turn:
        self.answers.append(answer)
        turn = next(self._script, None)
        if turn is None:
            raise ConversationOver
        said = turn(answer) if callable(turn) else turn
        return replace(said, number=len(self.answers))

    async def _run(self, _: int, function: Callable[[], Any]) -> Any:
        return function()
