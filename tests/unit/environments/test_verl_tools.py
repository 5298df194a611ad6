"""Files of tools for verl that cannot be used: one sentence."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from environments.adapters.verl_tools import load_verl_tools
from splitppo.config import ConfigError
from tests.support.user_tools import write

UNDESCRIBED = """
from verl.tools.function_tool import function_tool
@function_tool
def weather(city: str) -> str: ...
"""


@pytest.fixture(autouse=True)
def no_verl_is_left() -> Iterator[None]:
    """Forgets the modules that stand for verl."""
    modules = dict(sys.modules)
    yield
    sys.modules.clear()
    sys.modules.update(modules)


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("a.py", "x = 1", "{f} has no function with verl's decorator @function_tool"),
        (
            "a.py",
            "import nowhere_at_all",
            "importing {f} failed: ModuleNotFoundError: No module named 'nowhere_at_all'",
        ),
        ("a.yaml", "tools: [", "{f}: ParserError: while parsing"),
        ("a.yaml", "{}", "{f}: KeyError: 'tools'; expected tools, as verl reads them"),
        ("a.py", UNDESCRIBED, "importing {f} failed: ValueError: weather: it has no docstring; expected"),
        ("a.yaml", "tools: {a: 1}", "{f}: ValueError: tools must be a list, got {{'a': 1}}"),
        ("a.yaml", "tools: [{config: {}}]", "{f}: ValueError: expected class_name, config, tool_schema, got no class"),
        (
            "a.yaml",
            "tools: [{class_name: a.B, config: {}, tool_shema: {}}]",
            "{f}: ValueError: expected class_name, config, tool_schema, got tool_shema",
        ),
        (
            "a.yaml",
            "tools: [{class_name: a.B, config: {type: mcp}, mcp: {mcp_servers_config_path: a.json}}]",
            "{f}: ValueError: a.B: expected native as config.type, got 'mcp'; servers of MCP: rollout.multi_turn.mcp_s",
        ),
        ("a.yaml", "tools: [{class_name: a_b.C, config: {}}]", "{f}: ModuleNotFoundError: No module named 'a_b'"),
        ("b.json", "", "{f}: FileNotFoundError: "),
    ],
)
def test_what_cannot_be_used_is_one_sentence(tmp_path: Path, name: str, text: str, expected: str) -> None:
    path = write(tmp_path, text, name) if text else tmp_path / name
    with pytest.raises(ConfigError) as raised:
        load_verl_tools(path)
    found = str(raised.value)
    assert "\n" not in found
    assert found.startswith("key 'rollout.multi_turn.environments': " + expected.format(f=path))
