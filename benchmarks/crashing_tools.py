"""How much longer a step takes if its tools end their process: python -m benchmarks.crashing_tools [--share 0.05].

All responses of a step talk at the same time, in turns of one call. The group that samples is not there: each turn
takes a fixed time instead, so that a step without crashes takes about two seconds. Environments, their processes and
their repetition are real. A call either always ends its process or never does, as with a bug in a tool. The figure is
the ratio of both steps.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from pathlib import Path

import numpy as np

from environments.pool import EnvironmentProcesses, Episode
from splitppo.config.subsections.code import CodeConfig
from splitppo.config.subsections.multi_turn import MultiTurnConfig

NUM_TURNS = 4
TURN_S = 0.5
TOOLS = '''
import os


def look(crashes: bool) -> str:
    """Looks.

    Args:
        crashes: whether it ends its process.
    """
    if crashes:
        os._exit(3)
    return "seen"
'''


async def talk(episode: Episode, crashes: list[bool]) -> int:
    """Holds one conversation; returns how many of its calls ended their process."""
    await episode.start()
    num_ended = 0
    for crash in crashes:
        await asyncio.sleep(TURN_S)
        call = json.dumps({"name": "look", "arguments": {"crashes": crash}})
        answer = await episode.say(f"<tool_call>{call}</tool_call>", "stop")
        num_ended += answer.num_tool_errors
        if answer.is_over:
            break
    episode.abandon()
    return num_ended


async def step(pool: EnvironmentProcesses, num_responses: int, share: float) -> tuple[float, int]:
    """Returns the seconds that a step takes in which a share of the calls crashes, and how many did."""
    crashes = np.random.default_rng(0).random((num_responses, NUM_TURNS)) < share
    begun_s = time.perf_counter()
    episodes = [pool.begin("default", {"ground_truth": ""}, seed=place) for place in range(num_responses)]
    ended = await asyncio.gather(*(talk(one, own.tolist()) for one, own in zip(episodes, crashes, strict=True)))
    return time.perf_counter() - begun_s, sum(ended)


async def measure(num_responses: int, share: float) -> None:
    """Prints the times of a step without crashes and of one with them."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "tools.py"
        file.write_text(TOOLS)
        config = MultiTurnConfig.model_validate({"environments": {"default": {"tools": [f"{file}:look"]}}})
        async with EnvironmentProcesses(
            config, CodeConfig(), tool_format="hermes", output=Path(folder) / "log"
        ) as pool:
            await step(pool, num_responses, 0.0)
            whole_s, _ = await step(pool, num_responses, 0.0)
            crashing_s, num_ended = await step(pool, num_responses, share)
    print(f"{num_responses} responses, {NUM_TURNS} turns: {whole_s:.1f} s without crashes")
    print(
        f"{crashing_s:.1f} s with {num_ended} calls that ended their process: {crashing_s / whole_s:.2f} times as long"
    )


def main() -> None:
    """Reads the arguments and measures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--responses", type=int, default=64)
    parser.add_argument("--share", type=float, default=0.05, help="of the calls that end their process")
    arguments = parser.parse_args()
    asyncio.run(measure(arguments.responses, arguments.share))


if __name__ == "__main__":
    main()
