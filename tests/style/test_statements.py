"""One statement does one thing: values that have nothing to do with each other are not assigned together."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("controller", "environments", "services", "splitppo", "rewards", "recipes", "deploy", "viewer", "tools")


def named(node: ast.expr) -> str | None:
    """The name that is assigned: `x` of `x`, `.x` of `a.x`; None for what has no name of its own."""
    if isinstance(node, ast.Name):
        return node.id
    return f".{node.attr}" if isinstance(node, ast.Attribute) else None


def packed(source: str) -> list[int]:
    """Lines of assignments `a, b = x, y` in which no later value needs an earlier name: not those that swap."""
    lines = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Assign(targets=[ast.Tuple(elts=targets)], value=ast.Tuple(elts=values)):
                names = [named(target) for target in targets]
                read = [{named(part) for part in ast.walk(value) if isinstance(part, ast.expr)} for value in values]
                is_at_once = any(name in later for number, name in enumerate(names) for later in read[number + 1 :])
                if None not in names and len(names) == len(values) and not is_at_once:
                    lines.append(node.lineno)
    return lines


@pytest.mark.parametrize("room", ROOMS)
def test_unrelated_values_are_assigned_one_by_one(room: str) -> None:
    files = [file for file in (ROOT / room).rglob("*.py") if "v1" not in file.parts]
    assert {str(file.relative_to(ROOT)): lines for file in files if (lines := packed(file.read_text()))} == {}


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("a, b = 1, 2", [1]),
        ("self.a, self.b = a, b", [1]),
        ("a, b = b, a", []),
        ("a, self.b = self.b, a.c", []),
        ("a, b = pair", []),
        ("low[0], low[1] = 1, 2", []),
    ],
)
def test_what_counts_as_packed(source: str, lines: list[int]) -> None:
    assert packed(source) == lines
