"""Files of a run folder are opened by splitppo/plain_file.py alone, so that no command waits for a pipe among them."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OPENERS = {"open", "read_text", "read_bytes", "write_text", "write_bytes", "FileHandler"}
# Opens what somebody else has made, never through a link, in a way of its own that does not wait either.
EXEMPT = ("splitppo/run_folder/files.py",)


def opened(source: str) -> list[int]:
    """Lines that open a file in another way; /proc, and `RunDir.open`, which has a limit of bytes, are no such way."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    named = [call for call in calls if isinstance(call.func, ast.Attribute | ast.Name)]
    names = {call: call.func.attr if isinstance(call.func, ast.Attribute) else call.func.id for call in named}
    found = [call for call, name in names.items() if name in OPENERS and "/proc/" not in ast.unparse(call)]
    return [call.lineno for call in found if not any(keyword.arg == "max_bytes" for keyword in call.keywords)]


@pytest.mark.parametrize("room", ["splitppo/run_folder", "controller/run", "controller/tracking/sinks"])
def test_files_of_a_run_folder_are_opened_in_one_way(room: str) -> None:
    sources = {str(file.relative_to(ROOT)): file.read_text() for file in (ROOT / room).rglob("*.py")}
    assert {name: lines for name, text in sources.items() if name not in EXEMPT and (lines := opened(text))} == {}


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("open(path)", [1]),
        ("path.open()", [1]),
        ("path.read_bytes()", [1]),
        ("Path('/proc/self/stat').read_text()", []),
        ("folder.open('a', max_bytes=3)", []),
        ("open_plain(path)", []),
    ],
)
def test_what_counts_as_another_way(source: str, lines: list[int]) -> None:
    assert opened(source) == lines
