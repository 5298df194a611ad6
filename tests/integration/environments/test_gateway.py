"""Agents that ask several things at a time, in real processes that are killed; what the log says of contexts."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

from environments.messages import Answer
from environments.pool import EnvironmentProcesses
from tests.support.user_tools import processes, write

AGENT = """
import asyncio, os, random, time
from pathlib import Path
import openai

async def run(endpoint, row):
    pids = Path(row["pids"])
    pids.write_text(f"{os.getpid()}\\n{pids.read_text() if pids.exists() else ''}")
    async with openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client:
        async def ask_thrice(name):
            messages = [{"role": "user", "content": name}]
            for number in range(3):
                await asyncio.sleep(random.random() / 20)
                answer = await client.chat.completions.create(model="policy", messages=messages)
                messages += [answer.choices[0].message, {"role": "user", "content": f"more of {name}"}]
            return messages[-2].content
        texts = await asyncio.gather(*map(ask_thrice, "abcd"))
    return {"score": 1.0, "texts": " ".join(texts)}
"""


async def hold(pool: EnvironmentProcesses, folder: Path, *, kill_after: tuple[int, ...] = ()) -> list[Answer]:
    """Holds a conversation; after turns of these numbers the process of the agent is killed."""
    pids = folder / "pids"
    episode = pool.begin("agent", {"data_source": "agent", "ground_truth": None, "pids": str(pids)}, 5, prompt=[])
    answers = [await episode.start()]
    while not answers[-1].is_over:
        number = len(answers)
        if number in kill_after:
            os.kill(int(pids.read_text().split()[0]), signal.SIGKILL)
        answers.append(await episode.say(f"turn {number} to {answers[-1].messages[-1]['content']}", "stop"))
    return answers


async def test_requests_that_overlap_are_repeated_in_their_order_after_each_kill(tmp_path: Path) -> None:
    agent = write(tmp_path, AGENT, "agent.py")
    log = tmp_path / "environments.log"
    async with processes({"agent": {"agent": f"{agent}:run"}}, timeout_s=60.0, output=log) as pool:
        answers = await asyncio.wait_for(hold(pool, tmp_path, kill_after=(2, 5, 9)), 200)
    assert len((tmp_path / "pids").read_text().split()) == 4
    *turns, last = answers
    assert (last.lost, last.agent_error, len(turns)) == ("", "", 12)
    assert last.final is not None
    texts = [f"turn {number} to {answer.messages[-1]['content']}" for number, answer in enumerate(turns, start=1)]
    assert {text for name in "abcd" for text in texts if text.endswith(f"more of {name}")} >= set(
        last.final["texts"].replace(" turn", "\nturn").splitlines()
    )
    lines = log.read_text()
    assert "a context begins: message 1 is user" in lines
    assert "the latest turn is" in lines
    assert "requests overlap" in lines
    assert "Traceback" not in lines
