"""Tools and environments of a user's, in files, and conversations with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from environments.messages import Answer
from environments.pool import EnvironmentProcesses, Episode
from splitppo.config.subsections.code import CodeConfig
from splitppo.config.subsections.multi_turn import MultiTurnConfig

# Enough for every call that should end, and short enough to wait for one that does not.
LIMIT_S = 2.0

TOOLS = '''
import asyncio, os, re, signal, time
from environments.chat import Step

CALLS = []

def lookup(key: str) -> str:
    """Looks a word up.

    Args:
        key: the word.
    """
    return f"the value of {key}"

def add(a: int, b: int = 2) -> int:
    """Adds two numbers.

    Args:
        a: the first one.
        b: the second one.
    """
    return a + b

async def pid(wait_s: float = 0.0) -> int:
    """Returns the process.

    Args:
        wait_s: how long it takes.
    """
    await asyncio.sleep(wait_s)
    return os.getpid()

def trouble(kind: str) -> object:
    """Is what goes wrong.

    Args:
        kind: how.
    """
    if kind == "raise":
        raise KeyError("k" * 1000)
    if kind == "raise nothing":
        raise ValueError
    if kind == "exit":
        raise SystemExit(3)
    if kind == "interrupt":
        raise KeyboardInterrupt
    if kind == "stop iteration":
        raise StopIteration
    if kind == "recursion":
        return trouble(kind)
    if kind == "leave":
        os._exit(3)
    if kind == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if kind == "hang":
        time.sleep(1000)
    if kind == "loop":
        while True:
            pass
    if kind == "hold":
        re.match(r"(a+)+$", "a" * 60 + "b")
    if kind == "fork":
        return "child" if os.fork() == 0 else "parent"
    if kind == "10 MB":
        return "x" * 10_000_000
    if kind == "10 MB in a list":
        return ["x" * 1000] * 10_000
    if kind.startswith("step "):
        return Step("told", **{
            "step nan": {"reward": float("nan")},
            "step text": {"reward": "5"},
            "step none": {"info": None},
            "step big": {"info": {"big": 10**400, "far": 1e300, "near": 3}},
        }[kind])
    return {
        "control": "\\x00\\x1b[31m\\x07\\ud800end",
        "number": 1.5,
        "none": None,
        "list": [1, {"a": "\\u00e9"}],
        "bytes": b"caf\\xc3\\xa9 \\xff",
        "keys": {(1, 2): 3},
    }[kind]

async def async_trouble(kind: str) -> str:
    """Is what goes wrong, asynchronously.

    Args:
        kind: how.
    """
    if kind == "wait":
        await asyncio.sleep(1000)
    if kind == "never cancelled":
        while True:
            try:
                await asyncio.sleep(1000)
            except asyncio.CancelledError:
                pass
    if kind == "cancel":
        raise asyncio.CancelledError
    if kind == "block":
        time.sleep(1000)
    return trouble(kind) if kind.startswith("step") else str(trouble(kind))
'''


def call(name: str, **arguments: Any) -> str:
    """Returns a call as a model of the format `hermes` writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def write(folder: Path, text: str, name: str = "mine.py") -> Path:
    """Writes a file of the user's and returns its path."""
    path = folder / name
    path.write_text(text)
    return path


def tools(path: Path, *names: str) -> dict[str, Any]:
    """Returns the configuration of an environment that consists of tools."""
    return {"tools": [f"{path}:{name}" for name in names]}


def processes(
    environments: dict[str, Any],
    *,
    tool_format: str | None = "hermes",
    output: Path | None = None,
    code: CodeConfig | None = None,
    asks_privileged: bool = False,
    **keys: Any,
) -> EnvironmentProcesses:
    """Returns environment processes for data sources of the environments' names; they have not been started."""
    keys = {"environments": environments, "timeout_s": LIMIT_S, "num_workers": 1, "max_parallel_calls": 4} | keys
    config = MultiTurnConfig.model_validate(keys)
    return EnvironmentProcesses(
        config, code or CodeConfig(), tool_format=tool_format, output=output, asks_privileged=asks_privileged
    )


async def started(pool: EnvironmentProcesses, data_source: str, seed: int = 1, **fields: Any) -> Episode:
    """Begins a conversation with the environment of a data source, which tells nothing before the first turn."""
    episode = pool.begin(data_source, {"data_source": data_source, "ground_truth": None, **fields}, seed)
    assert await episode.start() == Answer()
    return episode


def contents(answer: Answer) -> list[str]:
    """Returns the texts that follow a turn; the environment has not failed."""
    assert not answer.lost
    return [message["content"] for message in answer.messages]


async def reply(episode: Episode, *calls: str) -> list[str]:
    """Says a turn with calls, and returns the texts that follow."""
    return contents(await episode.say("".join(calls), "stop"))
