"""Tools of MCP servers: what is refused before a run, and what a server must be told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from environments.adapters.mcp import Server
from environments.loading import load_environments
from environments.tools import Tool
from splitppo.config import ConfigError
from splitppo.config.subsections.code import CodeConfig
from splitppo.config.subsections.multi_turn import EnvironmentConfig, MultiTurnConfig

KEY = "rollout.multi_turn.mcp_servers.words"


@pytest.mark.parametrize(
    ("server", "expected"),
    [
        (
            {"url": "http://127.0.0.1:1/mcp"},
            f"{KEY}: http://127.0.0.1:1/mcp cannot be used: All connection attempts fail",
        ),
        ({"url": "127.0.0.1"}, f"{KEY}: 127.0.0.1 cannot be used: Request URL is missing an 'http://' or 'https://'"),
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
    limits = {"timeout_s": server.pop("timeout_s", 30.0)}
    with pytest.raises(ConfigError) as refused:
        await Server("words", MultiTurnConfig.model_validate({"mcp_servers": {"words": server}, **limits})).tools()
    assert str(refused.value).startswith(expected)
    assert "\n" not in str(refused.value)


def tool(name: str) -> Tool:
    return Tool(print, {"type": "function", "function": {"name": name}})


SERVERS = {"words": [tool("lookup"), tool("spell")], "more": [tool("lookup")], "none": []}


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
        load_environments({"math": EnvironmentConfig.model_validate({"tools": tools})}, CodeConfig(), SERVERS)
    assert str(refused.value).startswith(f"rollout.multi_turn.environments.math.tools: {expected}")


def test_a_server_gives_all_of_its_tools_or_one() -> None:
    configs = {"all": {"tools": "mcp:words"}, "one": {"tools": ["mcp:words/spell", "mcp:more"]}}
    loaded = load_environments(
        {name: EnvironmentConfig.model_validate(one) for name, one in configs.items()}, CodeConfig(), SERVERS
    )
    names = {name: [schema["function"]["name"] for schema in one.schemas] for name, one in loaded.items()}
    assert names == {"all": ["lookup", "spell"], "one": ["spell", "lookup"]}


def test_a_tool_without_types_takes_what_the_model_gives() -> None:
    assert tool("lookup").check({"key": 3}) == {"key": 3}


def test_environments_with_tools_of_servers_are_remote(tmp_path: Path) -> None:
    assert EnvironmentConfig(tools=("mine.py:add", "mcp:words/lookup")).is_remote
    assert not EnvironmentConfig(tools=("mine.py:add",)).is_remote
