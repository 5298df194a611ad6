"""Reads pages that can be followed, such as the recipes of docs/extending/, and follows them in a folder.

A recipe is a page; each of its fenced blocks is one action, which the paragraph above the fence names:

    `FILE`, a new file:                    FILE, which is not there yet, is what is in the block
    `FILE`, at the end:                    the block is added to FILE
    `FILE`, after the line `LINE`:         likewise, behind the only line that reads LINE, numbers of spaces aside
    `FILE`, before the line `LINE`:        likewise, before it
    `FILE`, in place of the line `LINE`:   likewise, and the line goes

and a block of sh is run as it stands, wherever it is.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[3]
PAGES = PROJECT / "docs" / "extending"
BIN = Path(sys.executable).parent

_TITLE = re.compile(r"^# (.+)$", re.MULTILINE)
_BLOCK = re.compile(
    r"(?P<above>(?:^(?!```)[^\n]+\n)*)\n*^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)
_PLACE = re.compile(
    r"`(?P<file>[^`]+)`, (?P<how>a new file|at the end|(?P<where>after|before|in place of) the line `(?P<line>[^`]+)`):"
)
# What the make that runs this test hands on to every make inside.
_OF_MAKE = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "ARGS", "LOCK", "VENV", "VLLM")


@dataclass(frozen=True)
class Action:
    """One block: an edit of a file, or commands (no file)."""

    file: str
    how: str
    line: str
    text: str


def read_recipes(folder: Path = PAGES) -> dict[str, Sequence[Action]]:
    """Returns the actions of every page, by its title."""
    return dict(read_recipe(page) for page in sorted(folder.glob("*.md")))


def read_recipe(page: Path) -> tuple[str, Sequence[Action]]:
    """Returns the title of a page, and its actions."""
    text = page.read_text(encoding="utf-8")
    title = _TITLE.search(text)
    assert title is not None, page
    return title[1], [_action(found) for found in _BLOCK.finditer(text, title.end())]


def _action(found: re.Match[str]) -> Action:
    if found["language"] == "sh":
        return Action("", "run", "", found["text"])
    place = _PLACE.fullmatch(" ".join(found["above"].split()))
    if place is None:
        raise ValueError(f"the line above a block says where it goes, this one does not: {found['above']!r}")
    return Action(place["file"], place["where"] or place["how"], place["line"] or "", found["text"])


class Folder:
    """A folder of a user's, to follow recipes in; `python` is that of this process.

    Args:
        root: the folder.
        source: the source tree that its commands import.
    """

    def __init__(self, root: Path, source: Path = PROJECT) -> None:
        self.root = root
        self._source = source

    def follow(self, recipe: Sequence[Action]) -> None:
        """Does what the blocks say, one after the other."""
        for action in recipe:
            if action.how == "run":
                self.run(action.text)
            else:
                self._edit(action)

    def run(self, commands: str) -> None:
        """Runs lines of sh at the root of the folder; AssertionError with all they have said if one of them fails."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
        for name in _OF_MAKE:
            environment.pop(name, None)
        # The environment of `make setup-dev` is there: nothing is installed for a test.
        commands = re.sub(r"^make ", "make --old-file=setup-dev ", commands, flags=re.MULTILINE)
        ended = subprocess.run(
            ["sh", "-euc", commands],
            cwd=self.root,
            env={**environment, "PYTHONPATH": str(self._source), "PATH": f"{BIN}{os.pathsep}{environment['PATH']}"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        assert ended.returncode == 0, f"{commands}\n{ended.stdout}"

    def _edit(self, action: Action) -> None:
        file = self.root / action.file
        if action.how == "a new file":
            assert not file.exists(), f"{action.file} is there already"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(action.text, encoding="utf-8")
            return
        lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
        start, end = len(lines), len(lines)
        if action.how != "at the end":
            places = [number for number, line in enumerate(lines) if line.split() == action.line.split()]
            assert len(places) == 1, f"{action.file} has {len(places)} lines that read {action.line!r}, expected one"
            start, end = places[0] + (action.how == "after"), places[0] + (action.how != "before")
        file.write_text("".join([*lines[:start], action.text, *lines[end:]]), encoding="utf-8")


class Copy(Folder):
    """A copy of the files that git tracks, to follow recipes in; `.venv` is the environment of this process."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, source=root)
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=PROJECT, capture_output=True, text=True, check=True)
        for name in filter(None, listed.stdout.split("\0")):
            if (PROJECT / name).is_file():
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(PROJECT / name, root / name)
        (root / ".venv").symlink_to(sys.prefix)
