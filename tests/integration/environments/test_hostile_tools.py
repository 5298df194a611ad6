"""Tools that raise, hang, end their process, or return what is no text: the model is told, everything else goes on."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from environments.pool import EnvironmentProcesses
from tests.support.user_tools import TOOLS, call, contents, processes, reply, started, tools, write

ALL = ("lookup", "add", "pid", "trouble", "async_trouble")


@pytest.fixture
async def pool(tmp_path: Path) -> AsyncIterator[EnvironmentProcesses]:
    async with processes({"t": tools(write(tmp_path, TOOLS), *ALL)}) as pool:
        yield pool


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("raise", repr("k" * 1000)[:300]),
        ("raise nothing", "ValueError"),
        ("exit", "SystemExit: 3"),
        ("interrupt", "KeyboardInterrupt: KeyboardInterrupt"),
        ("stop iteration", ""),
        ("recursion", "maximum recursion depth exceeded"),
        ("10 MB", "the result has 10,000,000 characters, more than 1 MiB"),
        ("10 MB in a list", "the result has 10,040,000 characters, more than 1 MiB"),
        ("step nan", "the environment returned nan, which is not a finite number"),
        ("step text", "the environment returned '5', expected a number as reward"),
        ("step none", "'NoneType' object has no attribute 'items'"),
    ],
)
@pytest.mark.parametrize("tool", ["trouble", "async_trouble"])
async def test_what_a_tool_raises_is_its_reply(pool: EnvironmentProcesses, tool: str, kind: str, expected: str) -> None:
    episode = await started(pool, "t")
    answer = await episode.say(call(tool, kind=kind), "stop")
    assert contents(answer)[0].startswith(expected[:40])
    assert len(contents(answer)[0]) <= 300
    assert (answer.num_calls, answer.num_tool_errors, answer.num_bad_calls, answer.num_timeouts) == (1, 1, 0, 0)
    assert answer.tool_error == f"{tool}: {contents(answer)[0]}"
    assert await reply(episode, call("add", a=1)) == ["3"]


async def test_numbers_that_no_metric_can_hold_are_left_out(pool: EnvironmentProcesses) -> None:
    answer = await (await started(pool, "t")).say(call("trouble", kind="step big"), "stop")
    assert (contents(answer), answer.notes, answer.num_tool_errors) == (["told"], {"near": 3}, 0)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("control", "\x00\x1b[31m\x07?end"),
        ("number", "1.5"),
        ("none", "null"),
        ("list", '[1, {"a": "é"}]'),
        ("bytes", "café \N{REPLACEMENT CHARACTER}"),
        ("keys", "{(1, 2): 3}"),
    ],
)
async def test_what_a_tool_returns_becomes_text(pool: EnvironmentProcesses, kind: str, expected: str) -> None:
    answer = await (await started(pool, "t")).say(call("trouble", kind=kind), "stop")
    assert contents(answer) == [expected]
    assert answer.num_tool_errors == 0


@pytest.mark.parametrize(
    ("tool", "kind"),
    [
        ("trouble", "hang"),
        ("trouble", "loop"),
        ("async_trouble", "never cancelled"),
        pytest.param("trouble", "hold", marks=pytest.mark.extended),
        pytest.param("async_trouble", "wait", marks=pytest.mark.extended),
        pytest.param("async_trouble", "block", marks=pytest.mark.extended),
    ],
)
async def test_a_tool_that_hangs_costs_its_own_call_only(pool: EnvironmentProcesses, tool: str, kind: str) -> None:
    hanging, other = await started(pool, "t"), await started(pool, "t")
    assert await reply(hanging, call("add", a=1)) == ["3"]
    answer, replies = await asyncio.gather(
        hanging.say(call("lookup", key="a") + call(tool, kind=kind) + call("lookup", key="b"), "stop"),
        reply(other, call("lookup", key="c")),
    )
    assert contents(answer) == ["the value of a", "timed out", "the value of b"]
    assert (answer.num_timeouts, answer.num_tool_errors, answer.num_calls) == (1, 0, 3)
    assert replies == ["the value of c"]
    assert await reply(other, call("add", a=5)) == ["7"]
    assert await reply(hanging, call("add", a=6)) == ["8"]


@pytest.mark.parametrize(
    ("kind", "expected"), [("leave", "ended its process with code 3"), ("crash", "was killed by signal 11 (SIGSEGV)")]
)
@pytest.mark.parametrize("tool", ["async_trouble", pytest.param("trouble", marks=pytest.mark.extended)])
async def test_a_tool_that_ends_its_process_costs_its_own_call_only(
    pool: EnvironmentProcesses, tool: str, kind: str, expected: str
) -> None:
    ending, *others = [await started(pool, "t") for _ in range(4)]
    answer, *replies = await asyncio.gather(
        ending.say(call("lookup", key="a") + call(tool, kind=kind) + call("lookup", key="b"), "stop"),
        *(reply(other, call("lookup", key="c")) for other in others),
    )
    assert contents(answer) == ["the value of a", expected, "the value of b"]
    assert (answer.num_timeouts, answer.num_tool_errors, answer.num_crashes) == (0, 1, 1)
    assert replies == [["the value of c"]] * 3
    assert await reply(ending, call("add", a=1)) == ["3"]


async def test_a_conversation_whose_calls_end_processes_again_is_over(pool: EnvironmentProcesses) -> None:
    ending, other = await started(pool, "t"), await started(pool, "t")
    assert await reply(ending, call("trouble", kind="leave")) == ["ended its process with code 3"]
    assert await reply(ending, call("add", a=1)) == ["3"]
    answer = await ending.say(call("lookup", key="a") + call("trouble", kind="leave"), "stop")
    assert (answer.is_over, answer.lost, answer.messages) == (True, "", ())
    assert (answer.num_calls, answer.num_tool_errors, answer.num_crashes) == (2, 1, 1)
    assert answer.tool_error == "a second call ended its process with code 3"
    assert await reply(other, call("add", a=1)) == ["3"]


@pytest.mark.extended
async def test_calls_that_hold_their_process_up_are_found_together(tmp_path: Path) -> None:
    async with processes({"t": tools(write(tmp_path, TOOLS), *ALL)}, timeout_s=0.5) as pool:
        episodes = [await started(pool, "t") for _ in range(3)]
        held = call("trouble", kind="hold")
        replies = await asyncio.gather(*(reply(one, held) for one in episodes[:2]), reply(episodes[2], call("pid")))
        assert replies[:2] == [["timed out"]] * 2
        again = await episodes[0].say(held, "stop")
    assert (again.is_over, again.num_timeouts, again.num_crashes, again.lost) == (True, 1, 0, "")


async def test_many_calls_that_end_their_process_at_once_cost_no_other_call(pool: EnvironmentProcesses) -> None:
    episodes = [await started(pool, "t") for _ in range(24)]
    calls = [call("trouble", kind="leave") if place % 6 == 0 else call("add", a=place) for place in range(24)]
    replies = await asyncio.gather(*(reply(*pair) for pair in zip(episodes, calls, strict=True)))
    ended = ["ended its process with code 3"]
    assert replies == [ended if place % 6 == 0 else [str(place + 2)] for place in range(24)]


async def test_a_call_that_cancels_itself_is_a_tool_error(pool: EnvironmentProcesses) -> None:
    episode = await started(pool, "t")
    assert await reply(episode, call("async_trouble", kind="cancel")) == ["it was cancelled"]


async def test_a_child_of_a_tool_that_comes_back_answers_nobody(pool: EnvironmentProcesses) -> None:
    episode = await started(pool, "t")
    for tool in ("trouble", "async_trouble", "trouble"):
        assert await reply(episode, call(tool, kind="fork")) == ["parent"]
    assert await reply(episode, call("add", a=1)) == ["3"]


async def test_a_process_that_is_killed_is_noticed_by_nobody(pool: EnvironmentProcesses) -> None:
    waiting, calling = await started(pool, "t"), await started(pool, "t")
    for episode in (waiting, calling):
        assert await reply(episode, call("add", a=1)) == ["3"]
    (pid,) = await reply(waiting, call("pid"))
    task = asyncio.create_task(reply(calling, call("pid", wait_s=0.5)))
    await asyncio.sleep(0)
    os.kill(int(pid), signal.SIGKILL)
    (other,) = await task
    assert other != pid
    assert await reply(calling, call("lookup", key="a")) == ["the value of a"]


async def test_other_messages_than_before_end_a_conversation_that_is_repeated(pool: EnvironmentProcesses) -> None:
    episode = await started(pool, "t")
    (pid,) = await reply(episode, call("pid"))
    os.kill(int(pid), signal.SIGKILL)
    answer = await episode.say(call("add", a=1), "stop")
    assert answer.is_over
    assert answer.lost == (
        "rollout.multi_turn.environments.t: it gave other messages than before when it was repeated in a new process"
    )
