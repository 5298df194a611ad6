"""Docstrings of the product stand alone: none begins with a word that needs the name above it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[2]
ROOMS = ("controller", "deploy", "environments", "recipes", "rewards", "services", "splitppo", "viewer")
FRAGMENTS = {"What", "Whether", "Of", "As", "With", "So"}


def first_words(file: Path) -> list[str]:
    """The first word of each docstring of a file."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))) if isinstance(node, kinds)]
    return [docstring.split()[0].rstrip(",.:") for node in nodes if (docstring := ast.get_docstring(node))]


@pytest.mark.parametrize("room", ROOMS)
def test_no_docstring_is_the_rest_of_a_sentence(room: str) -> None:
    files = [file for file in (PROJECT / room).rglob("*.py") if "v1" not in file.parts]
    words = {file: first_words(file) for file in files}
    assert any(words.values())
    assert {file.name: found for file, of_file in words.items() if (found := FRAGMENTS & {*of_file})} == {}
