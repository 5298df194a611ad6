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


def unconditional(source: str) -> list[int]:
    """Lines in which `:=` gives a name to a value that its own line does not test."""
    tree = ast.parse(source)
    tests: list[ast.AST] = []
    for node in ast.walk(tree):
        match node:
            case ast.If() | ast.While() | ast.IfExp() | ast.Assert():
                tests.append(node.test)
            case ast.comprehension():
                tests += node.ifs
            case ast.BoolOp() | ast.Compare():
                tests.append(node)
    tested = {part for test in tests for part in ast.walk(test)}
    return [node.lineno for node in ast.walk(tree) if isinstance(node, ast.NamedExpr) and node not in tested]


@pytest.mark.parametrize("room", ROOMS)
def test_a_value_is_named_within_an_expression_only_where_that_tests_it(room: str) -> None:
    files = [file for file in (ROOT / room).rglob("*.py") if "v1" not in file.parts]
    found = {str(file.relative_to(ROOT)): lines for file in files if (lines := unconditional(file.read_text()))}
    assert found == {}


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("f(x := 1)", [1]),
        ("y = (x := 1) + x", [1]),
        ("if x := f(): pass", []),
        ("while len(x := f()) > 3: pass", []),
        ("[x for y in z if (x := f(y))]", []),
        ("a = x if (x := f()) else 0", []),
    ],
)
def test_what_counts_as_named_without_a_test(source: str, lines: list[int]) -> None:
    assert unconditional(source) == lines
