"""Agents as a user writes them, for tests of runs; a run names this file in its configuration, or runs it.

`by_openai`, `by_retries` and the programs ask a chat API; `by_chat` is the same as a coroutine of an environment.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
import urllib.request
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from openai import AsyncOpenAI

    from environments.chat import Chat, Turn
    from environments.gateway.session import Endpoint

NUM_TURNS = 5
PROGRAMS = ("by_anthropic", "by_urllib")  # what this file runs by their names
KILLS = "SPLITPPO_TEST_KILLS"  # a file; the process is killed in a second turn, unless the file is there
Ask = Callable[[Sequence[Mapping[str, str]]], Awaitable[str]]


async def play(ask: Ask, seed: int, letters: str) -> dict[str, Any]:
    """Asks twice, then in a context that begins anew, then what follows the first turn, two times.

    Letters like those of the row are rewarded.
    """
    draws = random.Random(seed)
    texts: list[str] = []

    async def say(*messages: Mapping[str, str]) -> None:
        texts.append(await ask(messages))

    def user(text: str) -> Mapping[str, str]:
        return {"role": "user", "content": text}

    first = user(f"{letters} {draws.randrange(10)}")
    await say(first)
    begun = (first, {"role": "assistant", "content": texts[0]})
    await say(*begun, user(str(draws.randrange(100))))
    kill_once()
    await say(user(f"{letters} {draws.randrange(10)}"))
    again = user(str(draws.randrange(100)))
    await say(*begun, again)
    await say(*begun, again)
    score = sum(letter in letters for text in texts for letter in text) / 16
    return {"score": score, "num_asked": len(texts)}


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
        return await play(partial(complete, client), row["seed"], row["ground_truth"])


async def by_retries(endpoint: Endpoint, row: Mapping[str, Any]) -> dict[str, Any]:
    """Plays by the client of OpenAI, which loses the first answer to each request, and tries again."""
    import httpx
    from openai import AsyncOpenAI

    class Losing(httpx.AsyncHTTPTransport):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            response = await super().handle_async_request(request)
            if request.headers["x-stainless-retry-count"] != "0":
                return response
            await response.aread()
            return httpx.Response(503, headers={"retry-after-ms": "1"})

    key = {"base_url": endpoint.base_url, "api_key": endpoint.api_key}
    async with AsyncOpenAI(**key, http_client=httpx.AsyncClient(transport=Losing())) as client:
        return await play(partial(complete, client), row["seed"], row["ground_truth"])


async def complete(client: AsyncOpenAI, messages: Sequence[Mapping[str, str]]) -> str:
    """Asks by the client of OpenAI."""
    answer = await client.chat.completions.create(model="policy", messages=messages)  # type: ignore[arg-type]
    return answer.choices[0].message.content or ""


async def by_chat(chat: Chat, row: Mapping[str, Any]) -> dict[str, Any]:
    """Plays as a coroutine."""
    turns: list[Turn] = []

    async def ask(messages: Sequence[Mapping[str, str]]) -> str:
        turns.append(await (chat.restart(*messages) if len(messages) == 1 else chat.turn(messages[-1], after=turns[0])))
        return turns[-1].text

    return await play(ask, chat.seed, row["ground_truth"])


async def fails(endpoint: Endpoint, row: Mapping[str, Any]) -> None:
    """Needs a package that is not there, after its first request."""
    from openai import AsyncOpenAI

    async with AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client:
        await client.chat.completions.create(
            model=endpoint.model, messages=[{"role": "user", "content": row["prompt"]}]
        )
    import a_package_that_is_not_there  # type: ignore[import-not-found]  # noqa: F401


async def by_anthropic(row: Mapping[str, Any]) -> dict[str, Any]:
    """Plays by the client of Anthropic, which finds in environment variables where the API is."""
    from anthropic import AsyncAnthropic

    async with AsyncAnthropic() as client:

        async def ask(messages: Sequence[Mapping[str, str]]) -> str:
            model = os.environ["ANTHROPIC_MODEL"]
            answer = await client.messages.create(model=model, messages=messages, max_tokens=1000)  # type: ignore[arg-type]
            return "".join(block.text for block in answer.content if block.type == "text")

        return await play(ask, row["seed"], row["ground_truth"])


async def by_urllib(row: Mapping[str, Any]) -> dict[str, Any]:
    """Plays without a client, as a program that starts at once."""

    async def ask(messages: Sequence[Mapping[str, str]]) -> str:
        headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
        url = f"{os.environ['OPENAI_BASE_URL']}/chat/completions"
        request = urllib.request.Request(url, json.dumps({"messages": messages}).encode(), headers)
        with urllib.request.urlopen(request) as response:  # noqa: ASYNC210 - it is alone in its process
            text: str = json.load(response)["choices"][0]["message"]["content"]
        return text

    return await play(ask, row["seed"], row["ground_truth"])


if __name__ == "__main__":  # a program, which prints its score
    given = json.loads(sys.stdin.readline())
    agent = {"by_anthropic": by_anthropic, "by_urllib": by_urllib}[sys.argv[1]]
    print(json.dumps(asyncio.run(agent(given))))  # noqa: T201
