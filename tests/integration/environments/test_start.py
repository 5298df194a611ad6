"""Files of the user's that cannot be used: one sentence when the processes are started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from environments.pool import EnvironmentProcesses
from splitppo.config import ConfigError
from splitppo.our_commands import our_python
from tests.support.user_tools import TOOLS, processes, tools, write


async def test_a_class_is_no_tool(tmp_path: Path) -> None:
    path = write(tmp_path, "class Game: ...")
    found = await refused(processes({"m": tools(path, "Game")}))
    assert found.endswith("Game is a class, expected a function; give an environment as path and name")


async def refused(pool: EnvironmentProcesses) -> str:
    with pytest.raises(ConfigError) as raised:
        async with pool:
            pass
    assert "\n" not in str(raised.value)
    return str(raised.value)


BAD = '''
def no_docstring(key: str): ...
def no_type(key):
    """Looks.

    Args:
        key: the word.
    """
def no_description(key: str):
    """Looks."""
def rest(*keys: str):
    """Looks.

    Args:
        keys: words.
    """
constant = 3
class NoReset: ...
class Neither:
    def reset(self): ...
class Both:
    def reset(self): ...
    def step(self, text): ...
    def look(self):
        """Looks."""
class Undescribed:
    def reset(self): ...
    def look(self, key: str):
        """Looks."""
def function(chat, row): ...
'''


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"tools": "no_docstring"}, "{t}: {f}:no_docstring: it has no docstring; expected one that says what it does"),
        ({"tools": "no_type"}, "{t}: {f}:no_type: argument 'key' has no type; expected one, as in key: str"),
        (
            {"tools": "no_description"},
            "{t}: {f}:no_description: argument 'key' has no description; expected a line under Args",
        ),
        (
            {"tools": "rest"},
            "{t}: {f}:rest: argument 'keys' cannot be given by name; expected arguments with names only",
        ),
        ({"tools": "missing"}, "key '{t}': {f} has no class or function 'missing'"),
        ({"tools": "constant"}, "key '{t}': {f} has no class or function 'constant'"),
        ({"name": "missing"}, "key '{n}': {f} has no class or function 'missing'"),
        (
            {"name": "NoReset"},
            "key '{n}': NoReset of {f}: expected a class with reset, or a coroutine converse(chat, row)",
        ),
        (
            {"name": "function"},
            "key '{n}': function of {f}: expected a class with reset, or a coroutine converse(chat, row)",
        ),
        (
            {"name": "Neither"},
            "key '{n}': Neither of {f}: expected either step or public methods that are tools, got neither",
        ),
        (
            {"name": "Both"},
            "key '{n}': Both of {f}: expected either step or public methods that are tools, got both step and look",
        ),
        (
            {"name": "Undescribed"},
            "key '{n}': Undescribed of {f}: look: argument 'key' has no description; expected a line under Args",
        ),
        (
            {"name": "Both", "kwargs": {"top": 3}},
            "key 'rollout.multi_turn.environments.m.kwargs': Both of {f}: got an unexpected keyword argument 'top'",
        ),
    ],
)
async def test_what_cannot_be_used_is_one_sentence(tmp_path: Path, environment: dict[str, Any], expected: str) -> None:
    path = write(tmp_path, BAD)
    key = "rollout.multi_turn.environments.m"
    config = tools(path, environment["tools"]) if "tools" in environment else {"path": str(path), **environment}
    found = await refused(processes({"m": config}))
    assert found == expected.format(f=path, t=f"{key}.tools", n=f"{key}.name")


async def test_a_file_that_does_not_import_is_one_sentence(tmp_path: Path) -> None:
    found = await refused(processes({"m": tools(write(tmp_path, "import nowhere_at_all"), "f")}))
    assert found.endswith("mine.py failed: ModuleNotFoundError: No module named 'nowhere_at_all' (line 1)")


async def test_without_websockets_one_sentence_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "raise ModuleNotFoundError('no websockets', name='websockets')", "websockets.py")
    monkeypatch.syspath_prepend(tmp_path)
    found = await refused(processes({"web": {"name": "openenv", "kwargs": {"url": "http://127.0.0.1:1"}}}))
    assert found.endswith(f"does not have the package websockets: {our_python()} -m pip install 'splitppo[openenv]'")


async def test_a_file_that_ends_the_process_is_one_sentence(tmp_path: Path) -> None:
    found = await refused(processes({"m": tools(write(tmp_path, "import os; os._exit(5)"), "f")}))
    assert found == "rollout.multi_turn.environments: a process that loaded them ended its process with code 5"


async def test_two_tools_of_one_name_are_one_sentence(tmp_path: Path) -> None:
    paths = [write(tmp_path, TOOLS, name) for name in ("a.py", "b.py")]
    found = await refused(processes({"m": {"tools": [f"{path}:lookup" for path in paths]}}))
    assert found.startswith("rollout.multi_turn.environments.m.tools: two tools have one name")
