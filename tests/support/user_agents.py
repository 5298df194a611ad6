"""Agents as a user writes them, for tests of runs; a run names this file in its configuration, or runs it.

`by_openai` and the program ask a chat API by the real client; `by_chat` is the same as a coroutine of an environment.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from environments.chat import Chat
    from environments.gateway.session import Endpoint

NUM_TURNS = 3
KILLS = "SPLITPPO_TEST_KILLS"  # a file; the process is killed in a second turn, unless the file is there
Ask = Callable[[Sequence[Mapping[str, str]]], Awaitable[str]]


async def play(ask: Ask, seed: int, letters: str) -> dict[str, Any]:
    """Asks three times, the last time in a context that begins anew; rewards letters like those of the row."""
    draws = random.Random(seed)
    messages = [{"role": "user", "content": f"{letters} {draws.randrange(10)}"}]
    score = 0.0
    for turn in range(1, NUM_TURNS + 1):
        text = await ask(messages)
        score += sum(letter in letters for letter in text) / 16
        if turn == 2:
            kill_once()
            messages = [{"role": "user", "content": f"{letters} {draws.randrange(10)}"}]
        else:
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": str(draws.randrange(100))}]
    return {"score": score, "num_asked": NUM_TURNS}


def kill_once() -> None:
    """Kills this process, unless one was killed before."""
    kills = Path(os.environ.get(KILLS) or os.devnull)
    if not kills.exists():
        kills.touch()
        os.kill(os.getpid(), signal.SIGKILL)


async def by_openai(endpoint: Endpoint, row: Mapping[str, Any]) -> dict[str, Any]:
    """Plays by the client of OpenAI."""
    from openai import AsyncOpenAI

    async with AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client:

        async def ask(messages: Sequence[Mapping[str, str]]) -> str:
            answer = await client.chat.completions.create(model=endpoint.model, messages=messages)  # type: ignore[arg-type]
            return answer.choices[0].message.content or ""

        return await play(ask, row["seed"], row["ground_truth"])


async def by_chat(chat: Chat, row: Mapping[str, Any]) -> dict[str, Any]:
    """Plays as a coroutine."""

    async def ask(messages: Sequence[Mapping[str, str]]) -> str:
        turn = await (chat.restart(*messages) if len(messages) == 1 else chat.turn(messages[-1]))
        return turn.text

    return await play(ask, chat.seed, row["ground_truth"])


async def fails(endpoint: Endpoint, row: Mapping[str, Any]) -> None:
    """Needs a package that is not there, after its first request."""
    from openai import AsyncOpenAI

    async with AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client:
        await client.chat.completions.create(
            model=endpoint.model, messages=[{"role": "user", "content": row["prompt"]}]
        )
    import a_package_that_is_not_there  # type: ignore[import-not-found]  # noqa: F401


def main() -> None:
    """Plays by the client of Anthropic, as a program that prints its score."""
    from anthropic import AsyncAnthropic

    row = json.loads(sys.stdin.readline())

    async def run() -> dict[str, Any]:
        async with AsyncAnthropic() as client:

            async def ask(messages: Sequence[Mapping[str, str]]) -> str:
                model = os.environ["ANTHROPIC_MODEL"]
                answer = await client.messages.create(model=model, messages=messages, max_tokens=1000)  # type: ignore[arg-type]
                return "".join(block.text for block in answer.content if block.type == "text")

            return await play(ask, row["seed"], row["ground_truth"])

    print(json.dumps(asyncio.run(run())))  # noqa: T201


if __name__ == "__main__":
    main()
