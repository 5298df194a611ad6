"""Servers of MCP's own SDK as tools: their schemas, results and failures, over standard input and output and HTTP."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import AsyncIterator, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest

from controller.conversations.checks import with_server_tools
from controller.run.folder import RunFolder
from environments.pool import EnvironmentProcesses
from splitppo.config import ConfigError, dump_config
from tests.support.configs import load
from tests.support.groups import is_alive, wait_until
from tests.support.mcp_server import COMMAND, HttpServer
from tests.support.user_tools import call, contents, processes, reply, started, write

# Longer than a busy machine needs to start a server.
LIMIT_S = 30.0
ALL = {"all": {"tools": "mcp:words"}}


def of(server: dict[str, Any], environments: dict[str, Any] = ALL, **keys: Any) -> EnvironmentProcesses:
    keys = {"timeout_s": LIMIT_S, "mcp_servers": {"words": server}} | keys
    return processes(environments, **keys)


@pytest.fixture
def http() -> Iterator[HttpServer]:
    with HttpServer() as server:
        yield server


@pytest.fixture(params=["stdio", "http"])
async def pool(request: pytest.FixtureRequest) -> AsyncIterator[EnvironmentProcesses]:
    server = {"command": [*COMMAND]} if request.param == "stdio" else {"url": request.getfixturevalue("http").url}
    async with of(server, {**ALL, "one": {"tools": "mcp:words/lookup"}}) as pool:
        yield pool


async def test_tools_of_a_server_are_called_and_its_failures_are_told(pool: EnvironmentProcesses) -> None:
    lookup, *others = pool.schemas_of("all")
    assert list(pool.schemas_of("one")) == [lookup]
    assert [one["function"]["name"] for one in others] == ["pid", "trouble"]
    assert (lookup["type"], lookup["function"]["description"]) == ("function", "Looks a word up.")
    assert lookup["function"]["parameters"]["required"] == ["key"]
    episode, other = await started(pool, "all"), await started(pool, "all")
    results = await reply(episode, call("lookup", key="a"), call("trouble", kind="image"), call("pid"))
    assert results[:2] == ["the value of a in en", "(image left out: only text can be shown)\nand a text"]
    assert await reply(other, call("pid")) == results[2:]  # the same session
    told = await episode.say(call("trouble", kind="raise") + call("lookup", word="a") + call("nothing"), "stop")
    assert (told.num_calls, told.num_tool_errors, told.num_bad_calls, told.num_timeouts) == (3, 2, 1, 0)
    assert contents(told)[0] == "Error executing tool trouble: broken"
    assert "key" in contents(told)[1]
    assert contents(told)[2] == "there is no tool 'nothing'; expected one of lookup, pid, trouble"


@pytest.mark.extended
async def test_a_server_that_ends_is_an_error_of_its_call_and_is_started_again() -> None:
    async with of({"command": [*COMMAND]}) as pool:
        episode = await started(pool, "all")
        [before] = await reply(episode, call("pid"))
        told = await episode.say(call("trouble", kind="leave"), "stop")
        assert (contents(told), told.num_tool_errors) == (["Connection closed"], 1)
        [after] = await reply(episode, call("pid"))
        assert before != after


@pytest.mark.extended
async def test_a_call_that_hangs_costs_itself_only(http: HttpServer) -> None:
    async with of({"url": http.url}, timeout_s=8.0) as pool:
        hanging, other = await started(pool, "all"), await started(pool, "all")
        await reply(other, call("pid"))
        told, _ = await asyncio.gather(hanging.say(call("trouble", kind="hang"), "stop"), reply(other, call("pid")))
        assert (contents(told), told.num_timeouts) == (["timed out"], 1)
        assert await reply(hanging, call("lookup", key="a")) == ["the value of a in en"]


async def test_a_server_that_was_lost_is_used_again_when_it_is_back_with_the_same_tools(http: HttpServer) -> None:
    async with of({"url": http.url}) as pool:
        episode, other = await started(pool, "all"), await started(pool, "all")
        assert await reply(episode, call("lookup", key="a")) == ["the value of a in en"]
        http.kill()
        for _ in range(3):
            told = await episode.say(call("lookup", key="a"), "stop")
            assert (told.num_tool_errors, told.lost) == (1, "")
        http.start("--more")
        key = "rollout.multi_turn.mcp_servers.words"
        told = await other.say(call("lookup", key="a"), "stop")
        assert told.lost == f"{key}: tools changed since the run began: more"
        http.kill()
        http.start()
        assert await reply(episode, call("lookup", key="b")) == ["the value of b in en"]


async def test_a_server_ends_with_its_process_whatever_ends_that(tmp_path: Path) -> None:
    async with of({"command": [*COMMAND, "--pids", str(tmp_path / "pids")]}) as pool:
        [server] = await reply(await started(pool, "all"), call("pid"))
        server_pid, child_pid = map(int, (tmp_path / "pids").read_text().split())
        assert int(server) == server_pid
        process = psutil.Process(server_pid).parent()
        assert process is not None
        os.kill(process.ppid(), signal.SIGKILL)
        wait_until(lambda: not any(map(is_alive, (server_pid, child_pid))), what="the end of the server")


class Refusing(BaseHTTPRequestHandler):
    """Notes the header of every request, and lets nobody in."""

    found: set[str | None]

    def do_POST(self) -> None:
        self.found.add(self.headers["Authorization"])
        self.send_error(401)

    def log_message(self, *_: object) -> None:
        pass


async def test_headers_come_from_variables_and_are_shown_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Refusing.found = set[str | None]()
    monkeypatch.setenv("WORDS_TOKEN", "hush-hush")
    with HTTPServer(("127.0.0.1", 0), Refusing) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/mcp"
        servers = f"{{words: {{url: '{url}', headers: {{Authorization: Bearer $WORDS_TOKEN}}}}}}"
        config = load(tmp_path, *KEYS, f"rollout.multi_turn.mcp_servers={servers}")
        with pytest.raises(ConfigError) as refused:
            with_server_tools(config)
        server.shutdown()
    assert found == {"Bearer hush-hush"}
    assert str(refused.value).startswith(f"rollout.multi_turn.mcp_servers.words: {url} cannot be used: ")
    assert "hush-hush" not in str(refused.value) + dump_config(config)


KEYS = ("rollout.multi_turn.environments={default: {tools: 'mcp:words'}}",)


def test_the_tools_of_servers_belong_to_the_run(tmp_path: Path, http: HttpServer) -> None:
    folder = f"run.dir={tmp_path / 'run'}"
    config = load(tmp_path, *KEYS, folder, f"rollout.multi_turn.mcp_servers={{words: {{url: '{http.url}'}}}}")
    with RunFolder(with_server_tools(config)) as run:
        assert sorted(run.config.rollout.multi_turn.mcp_tools["words"]) == ["lookup", "pid", "trouble"]
        (run.path / "metrics.jsonl").write_text('{"step": 1}\n')
    stdio = load(tmp_path, *KEYS, folder, f"rollout.multi_turn.mcp_servers={{words: {{command: {[*COMMAND]}}}}}")
    RunFolder(with_server_tools(stdio)).check()  # where a server is may change
    http.kill()
    http.start("--more")
    with pytest.raises(ConfigError) as refused:
        RunFolder(with_server_tools(config)).check()
    [line] = [line for line in str(refused.value).splitlines() if "mcp_tools" in line]
    assert line == "  rollout.multi_turn.mcp_tools.words: the tool more of the server words is new"


async def test_without_the_sdk_one_sentence_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "raise ModuleNotFoundError(\"No module named 'mcp'\", name='mcp')", "mcp.py")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"does not have the package mcp: \S+ -m pip install 'splitppo\[mcp\]'$"):
        async with of({"command": [*COMMAND]}):
            pass
