"""Tools of MCP servers: what is refused before a run, and what a server must be told."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from environments.adapters.mcp import Server
from environments.loading import Loaded, load_environments
from environments.messages import Setup
from environments.tools import Tool
from splitppo.config import ConfigError
from splitppo.config.subsections.code import CodeConfig
from splitppo.config.subsections.mcp_server import McpServerConfig
from splitppo.config.subsections.multi_turn import EnvironmentConfig, MultiTurnConfig
from tests.support.scripted_mcp import NUM_MEETING, TOOL, ScriptedServer

KEY = "rollout.multi_turn.mcp_servers.words"


@pytest.mark.parametrize(
    ("server", "expected"),
    [
        (
            {"url": "http://127.0.0.1:1/mcp"},
            f"{KEY}: http://127.0.0.1:1/mcp cannot be used: All connection attempts fail",
        ),
        ({"url": "127.0.0.1"}, f"{KEY}: 127.0.0.1 cannot be used: Request URL is missing an 'http://' or 'https://'"),
        ({"url": "$EMPTY"}, f"{KEY}: $EMPTY cannot be used: Request URL is missing an 'http://' or 'https://'"),
        ({"command": ["nowhere"]}, f"key '{KEY}.command': there is no program 'nowhere'"),
        ({"command": ["true"]}, f"{KEY}: true cannot be used: Connection closed"),
        ({"command": ["sleep", "100"], "timeout_s": 0.5}, f"{KEY}: sleep 100 cannot be used: no answer within 0.5 s"),
        (
            {"url": "http://127.0.0.1:1/$NO_SUCH"},
            f"key '{KEY}.url': expected $NAME of environment variables that are set: 'NO_SUCH'",
        ),
        (
            {"url": "http://127.0.0.1:1/", "headers": {"Authorization": "Bearer $TWO_LINES"}},
            f"key '{KEY}.headers': expected one line of ASCII after $NAME was replaced",
        ),
    ],
)
async def test_a_server_that_cannot_be_used_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, server: dict[str, Any], expected: str
) -> None:
    monkeypatch.setenv("TWO_LINES", "one\ntwo")
    monkeypatch.setenv("EMPTY", "")
    limits = {"timeout_s": server.pop("timeout_s", 30.0)}
    with pytest.raises(ConfigError) as refused:
        await Server("words", MultiTurnConfig.model_validate({"mcp_servers": {"words": server}, **limits})).tools()
    assert str(refused.value).startswith(expected)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("server", [{}, {"url": ""}, {"url": "http://a", "command": ["true"]}])
def test_a_server_has_either_an_address_or_a_program(server: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="expected either url or command"):
        McpServerConfig.model_validate(server)


async def tools_of(server: ScriptedServer, **keys: Any) -> list[Tool]:
    servers = {"words": {"url": server.url, **keys}}
    return await Server("words", MultiTurnConfig.model_validate({"mcp_servers": servers, "timeout_s": 60.0})).tools()


@pytest.mark.parametrize(
    ("tools", "expected"),
    [
        ([TOOL, TOOL], "expected names of tools that differ and are not empty, got 'do'"),
        ([{**TOOL, "name": ""}], "expected names of tools that differ and are not empty, got ''"),
        ([{"name": "do"}], "1 validation error for ListToolsResult tools.0.inputSchema Field required "),
    ],
)
async def test_a_server_with_tools_that_cannot_be_used_is_refused(tools: list[Any], expected: str) -> None:
    with ScriptedServer(tools) as server, pytest.raises(ConfigError) as refused:
        await tools_of(server)
    assert str(refused.value).startswith(f"{KEY}: {server.url} cannot be used: {expected}")
    assert "\n" not in str(refused.value)


@pytest.fixture
def scripted() -> Iterator[ScriptedServer]:
    with ScriptedServer() as server:
        yield server


@pytest.mark.parametrize("kind", ["close", "half", "404", "html", "202"])
async def test_a_broken_call_fails_alone_and_the_next_one_opens_a_session(scripted: ScriptedServer, kind: str) -> None:
    [do] = await tools_of(scripted)
    slow = asyncio.create_task(do.function(kind="wait"))
    assert await asyncio.to_thread(scripted.is_waiting.wait, 60.0)
    with pytest.raises(RuntimeError):
        await do.function(kind=kind)
    assert await do.function(kind="ok") == "session 2"
    scripted.may_go_on.set()
    assert await slow == "session 1"


async def test_all_calls_of_a_batch_are_made_at_the_same_time(scripted: ScriptedServer) -> None:
    [do] = await tools_of(scripted)
    answers = await asyncio.gather(*(do.function(kind="meet") for _ in range(NUM_MEETING)))
    assert {*answers} == {"session 1"}


@pytest.mark.parametrize("kind", ["refuse", "fail"])
async def test_errors_of_a_server_do_not_repeat_what_variables_hold(
    scripted: ScriptedServer, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setenv("WORDS_TOKEN", "hush-hush")
    [do] = await tools_of(scripted, headers={"Authorization": "Bearer $WORDS_TOKEN"})
    with pytest.raises(RuntimeError, match=r"^bad Bearer \$WORDS_TOKEN$"):
        await do.function(kind=kind)


async def test_what_a_program_writes_that_is_no_message_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    servers = {"words": {"command": [sys.executable, "-c", "print(*range(100), sep='\\n')"]}}
    with pytest.raises(ConfigError, match="cannot be used: Connection closed"):
        await Server("words", MultiTurnConfig.model_validate({"mcp_servers": servers})).tools()
    assert caplog.records == []


def tool(name: str) -> Tool:
    return Tool(print, {"type": "function", "function": {"name": name}})


SERVERS = {"words": [tool("lookup"), tool("spell")], "more": [tool("lookup")], "none": []}


def load(**environments: Any) -> dict[str, Loaded]:
    servers = {name: {"url": "http://127.0.0.1:1"} for name in SERVERS}
    config = MultiTurnConfig.model_validate({"environments": environments, "mcp_servers": servers})
    return load_environments(Setup(config, None, None, CodeConfig()), SERVERS)


@pytest.mark.parametrize(
    ("tools", "expected"),
    [
        ("mcp:words/lock", "mcp:words/lock: the server has no such tool, it has lookup, spell"),
        ("mcp:none", "mcp:none: the server has no such tool, it has none"),
        (["mcp:words", "mcp:more"], "two tools have one name; expected names that differ, got mcp:words, mcp:more"),
        (
            ["mcp:words/lookup", "mcp:words"],
            "two tools have one name; expected names that differ, got mcp:words/lookup",
        ),
    ],
)
def test_tools_that_cannot_be_told_apart_or_found_are_refused(tools: list[str], expected: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load(math={"tools": tools})
    assert str(refused.value).startswith(f"rollout.multi_turn.environments.math.tools: {expected}")


def test_a_server_gives_all_of_its_tools_or_one() -> None:
    loaded = load(all={"tools": "mcp:words"}, one={"tools": ["mcp:words/spell", "mcp:more"]})
    names = {name: [schema["function"]["name"] for schema in one.schemas] for name, one in loaded.items()}
    assert names == {"all": ["lookup", "spell"], "one": ["spell", "lookup"]}


def test_a_tool_without_types_takes_what_the_model_gives() -> None:
    assert tool("lookup").check({"key": 3}) == {"key": 3}


def test_environments_with_tools_of_servers_are_remote(tmp_path: Path) -> None:
    assert EnvironmentConfig(tools=("mine.py:add", "mcp:words/lookup")).is_remote
    assert not EnvironmentConfig(tools=("mine.py:add",)).is_remote
