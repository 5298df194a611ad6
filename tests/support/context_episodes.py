"""Conversations of three turns with several contexts, as a user writes them; a run names this file, or one like it."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from environments.chat import Chat, ContextFull, Turn
from environments.messages import Message

MAX_CONTEXT_LENGTH = 80  # tokens of one character each, in which NO_ROOM finds no room behind prompt and turn
NO_ROOM = "?" * 75
WITH_TEMPLATE = f"data.chat_template={Path(__file__).with_suffix('.jinja')}"


async def converse(chat: Chat, row: Mapping[str, Any]) -> None:
    """Holds an episode whose answers take their time."""
    await episode(chat, row, max_pause_s=0.02)


async def episode(chat: Chat, row: Mapping[str, Any], *, max_pause_s: float = 0.0, kills: str = "") -> None:
    """Holds three turns: in one context, from a prompt of its own, or in several contexts.

    These go back to turn 1, or begin because the first one is full.

    Args:
        chat: its seed decides which.
        row: the letters of its ground truth are rewarded.
        max_pause_s: the longest time that an answer takes, drawn at random.
        kills: a file; the process is killed after a second turn, unless the file is there.
    """
    draws = random.Random(chat.seed)
    kind = chat.seed % 4

    async def answered(turn: Turn) -> Message:
        await asyncio.sleep(random.uniform(0.0, max_pause_s))
        if kills and turn.number == 2:
            _kill_once(Path(kills))
        chat.reward(sum(letter in row["ground_truth"] for letter in turn.text) / 16)
        return _user(f"{draws.randrange(100)}")

    begin = _user(f" {draws.randrange(10)}")
    first = await (chat.restart(begin) if kind == 1 else chat.turn(begin))
    message = await answered(first)
    if kind == 2:
        second = await chat.restart(message)
        last = await chat.turn(await answered(second), after=first)
    elif kind == 3:
        second = await _when_full(chat, message)
        last = await chat.turn(await answered(second))
    else:
        second = await chat.turn(message)
        last = await chat.turn(await answered(second))
    await answered(last)


async def _when_full(chat: Chat, message: Message) -> Turn:
    """Says what has no room, and then begins anew."""
    try:
        return await chat.turn(_user(NO_ROOM))
    except ContextFull:
        return await chat.restart(message)


def _kill_once(mark: Path) -> None:
    """Ends this process, unless it has been done before."""
    if not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def _user(text: str) -> Message:
    return {"role": "user", "content": text}
