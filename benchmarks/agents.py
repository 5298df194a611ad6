"""What agent programs cost in an environment process: python -m benchmarks.agents [--agents 256] [--at-a-time 64].

The policy says each turn at once, or after a pause; agents and gateway are real. Two questions:

* Many agents: are all of them answered, with no more than so many programs alive, and how long does one wait for its
  turn? While others wait for a place, a program that waits for the policy is ended, and started again later.
* A turn: how much CPU does the environment process need for a turn of a program (by HTTP, in a process of its own), of
  a function that has the client of openai in this very process, and of a coroutine? Beginnings do not count: each
  figure is the difference of two runs with other numbers of turns.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from environments.messages import Answer
from environments.pool import EnvironmentProcesses
from splitppo.config.subsections.code import CodeConfig
from splitppo.config.subsections.multi_turn import MultiTurnConfig

PROGRAM = """
import http.client, json, os, sys
from urllib.parse import urlsplit

row = json.loads(sys.stdin.readline())
at = urlsplit(os.environ["OPENAI_BASE_URL"])
connection = http.client.HTTPConnection(at.netloc)
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
messages = [{"role": "user", "content": "go"}]
for _ in range(row["turns"]):
    asked = json.dumps({"model": "policy", "messages": messages})
    connection.request("POST", at.path + "/chat/completions", asked, headers)
    answer = json.loads(connection.getresponse().read())
    messages += [answer["choices"][0]["message"], {"role": "user", "content": "more"}]
print(json.dumps({"score": 1.0}))
"""
FUNCTIONS = """
import time
from openai import AsyncOpenAI

CLIENT = AsyncOpenAI(base_url="http://127.0.0.1", api_key="none", timeout=600.0)


async def run(endpoint, row):
    client = CLIENT.with_options(base_url=endpoint.base_url, api_key=endpoint.api_key)
    messages = [{"role": "user", "content": "go"}]
    for _ in range(row["turns"]):
        answer = await client.chat.completions.create(model="policy", messages=messages)
        messages += [answer.choices[0].message.model_dump(), {"role": "user", "content": "more"}]
    return 1.0


async def converse(chat, row):
    for _ in range(row["turns"]):
        await chat.turn({"role": "user", "content": "more"})
    return 1.0


async def clock(chat, row):
    await chat.turn()
    chat.note(cpu_s=time.process_time())
"""


@dataclass
class Held:
    """A conversation that was held: its turns, how long it took, and how long it kept the policy waiting for each."""

    num_turns: int = 0
    wall_s: float = 0.0
    waits_s: list[float] = field(default_factory=list)
    last: Answer | None = None


def pool(folder: Path, at_a_time: int) -> EnvironmentProcesses:
    """Returns one environment process with a program, a function, a coroutine, and a clock of its CPU time."""
    (folder / "program.py").write_text(PROGRAM)
    (folder / "functions.py").write_text(FUNCTIONS)
    functions = str(folder / "functions.py")
    environments: dict[str, Any] = {
        "program": {"command": [sys.executable, "-S", "-E", str(folder / "program.py")], "reward": "output"},
        "function": {"agent": f"{functions}:run"},
        "coroutine": {"path": functions, "name": "converse"},
        "clock": {"path": functions, "name": "clock"},
    }
    section = {"environments": environments, "num_workers": 1, "gateway": {"max_agents": at_a_time}}
    output = folder / "output.log"
    return EnvironmentProcesses(MultiTurnConfig.model_validate(section), CodeConfig(), tool_format=None, output=output)


async def hold(processes: EnvironmentProcesses, kind: str, num_turns: int, pause_s: float = 0.0) -> Held:
    """Holds one conversation of this kind, whose turns the policy says after a pause."""
    held = Held()
    began_s = time.perf_counter()
    episode = processes.begin(kind, {"turns": num_turns}, seed=0)
    answer = await episode.start()
    held.waits_s.append(time.perf_counter() - began_s)
    while not answer.is_over:
        await asyncio.sleep(pause_s)
        said_s = time.perf_counter()
        answer = await episode.say("a turn of the policy", "stop")
        held.num_turns += 1
        held.waits_s.append(time.perf_counter() - said_s)
    held.wall_s = time.perf_counter() - began_s
    held.last = answer
    return held


async def cpu_s(processes: EnvironmentProcesses) -> float:
    """Returns the CPU seconds that the environment process has used."""
    last = (await hold(processes, "clock", 1)).last
    assert last is not None
    return float(last.notes["cpu_s"])


def num_alive(program: str) -> int:
    """Returns how many programs live now: processes that have this file as an argument of Python."""
    alive = 0
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            arguments = file.read_bytes().split(b"\0")
        except OSError:  # it has ended
            continue
        alive += arguments[1:4] == [b"-S", b"-E", program.encode()]
    return alive


async def many(folder: Path, num_agents: int, at_a_time: int, num_turns: int, pause_s: float) -> None:
    """Prints what becomes of many programs that begin at the same time."""
    peak = 0

    async def watch() -> None:
        nonlocal peak
        while True:
            peak = max(peak, num_alive(str(folder / "program.py")))
            await asyncio.sleep(0.2)

    async with pool(folder, at_a_time) as processes:
        watching = asyncio.create_task(watch())
        began_s = time.perf_counter()
        held = await asyncio.gather(*(hold(processes, "program", num_turns, pause_s) for _ in range(num_agents)))
        wall_s = time.perf_counter() - began_s
        watching.cancel()
    whole = sum(one.num_turns == num_turns and one.last is not None and not one.last.lost for one in held)
    waits_s = [wait for one in held for wait in one.waits_s]
    walls_s = [one.wall_s for one in held]
    print(
        f"{num_agents} agents of {num_turns} turns, a turn takes the policy {pause_s:g} s: {whole} ended well, at most"
        f" {peak} alive (gateway.max_agents {at_a_time}); {wall_s:.1f} s in all; the policy waits for a request"
        f" {statistics.median(waits_s):.2f} s (median), at most {max(waits_s):.1f} s; a conversation takes"
        f" {statistics.median(walls_s):.1f} s (median), at most {max(walls_s):.1f} s"
    )


async def turns(folder: Path, num_agents: int, few: int, more: int) -> None:
    """Prints the CPU time of a turn of each kind."""
    each_ms = {}
    async with pool(folder, num_agents) as processes:
        for kind in ("coroutine", "program", "function"):
            spent = []
            for num_turns in (few, more):
                before_s = await cpu_s(processes)
                await asyncio.gather(*(hold(processes, kind, num_turns) for _ in range(num_agents)))
                spent.append(await cpu_s(processes) - before_s)
            each_ms[kind] = 1e3 * (spent[1] - spent[0]) / (num_agents * (more - few))
    for kind, ms in each_ms.items():
        print(f"a turn of a {kind}: {ms:.2f} ms of CPU in the environment process")
    print(f"the gateway: {each_ms['program'] - each_ms['coroutine']:.2f} ms a turn more than a coroutine (goal: 3)")


def main() -> None:
    """Measures both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", type=int, default=256)
    parser.add_argument("--at-a-time", type=int, default=64)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--pause", type=float, default=0.5, metavar="SECONDS", help="the time of a turn of the policy")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        asyncio.run(turns(folder, 16, few=5, more=25))
        asyncio.run(many(folder, options.agents, options.at_a_time, options.turns, options.pause))


if __name__ == "__main__":
    main()
