"""The structure of the code: the reading list, the ways of prompts, turns and answers, and forbidden imports.

That no module imports one of a layer above it is checked by import-linter, in `make check` (layers in pyproject.toml).
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
READING_LIST = re.findall(r"^\d+\. \[([\w/.]+)\]", (ROOT / "README.md").read_text(), re.MULTILINE)
PRODUCT = ("controller", "environments", "services", "splitppo", "rewards", "recipes", "deploy", "viewer")


def test_the_reading_list_begins_with_the_algorithm_and_names_files_that_are_there() -> None:
    assert READING_LIST[0] == "controller/trainer.py"
    assert [file for file in READING_LIST if not (ROOT / file).is_file()] == []


def product_files() -> list[Path]:
    return [file for folder in PRODUCT for file in sorted((ROOT / folder).rglob("*.py"))]


def module_of(file: Path) -> str:
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imported_names(source: str) -> Iterator[str]:
    """Names that a module imports anywhere: at once, under `if TYPE_CHECKING`, or in a function."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def imports(sources: dict[str, str]) -> dict[str, set[str]]:
    """Modules by module that imports them: `from a.b import c` means a.b.c where that is a module, else a.b."""
    graph = {}
    for module, source in sources.items():
        modules = (name if name in sources else name.rpartition(".")[0] for name in imported_names(source))
        graph[module] = {name for name in modules if name in sources}
    return graph


def circle(graph: dict[str, set[str]]) -> list[str]:
    """Returns modules of which each imports the next, and the last one is the first; nothing if there are none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return [str(module) for module in reversed(error.args[1])]
    return []


def test_no_modules_import_each_other_in_a_circle_not_even_for_their_types() -> None:
    graph = imports({module_of(file): file.read_text() for file in product_files()})
    assert len(graph) > 200
    assert "controller.step" in {name.rpartition(".")[0] for name in graph["controller.trainer"]}
    assert circle(graph) == []


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("from a import b", {"a.b"}),
        ("import a.c", {"a.b", "a.c"}),
        ("from a.c import C", {"a.b", "a.c"}),
        ("if TYPE_CHECKING:\n    from a.c import C", {"a.b", "a.c"}),
        ("def f():\n    import a.c", {"a.b", "a.c"}),
        ("from a import d", set()),
    ],
)
def test_a_circle_is_found_wherever_a_module_imports(source: str, expected: set[str]) -> None:
    found = circle(imports({"a": "", "a.b": source, "a.c": "from a.b import B", "a.d": "import json"}))
    assert set(found) == expected


def test_neither_the_controllers_side_nor_a_reward_loads_torch_or_a_service() -> None:
    rewards = [f"rewards.{file.stem}" for file in (ROOT / "rewards").glob("*.py") if file.stem != "__init__"]
    modules = ["controller.__main__", "controller.session", "controller.preflight", *rewards]
    assert "rewards.manager" in modules
    code = f"import sys, {', '.join(modules)}; print(*({{'torch', 'transformers', 'services'}} & sys.modules.keys()))"
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert ended.stdout.split() == []


def ways_of(heading: str) -> dict[str, list[str]]:
    """Files by way: the tables below a heading of docs/architecture.md, each under the first bold words before it."""
    page = (ROOT / "docs/architecture.md").read_text()
    section = re.split(r"^## ", page.split(f"## {heading}\n")[1], flags=re.MULTILINE)[0]
    parts = re.split(r"^\*\*(.+?)\*\*", f"**{heading}**{section}", flags=re.MULTILINE)
    files = [re.findall(r"^\| \d+ \| `([\w/.]+)` \|", part, re.MULTILINE) for part in parts[2::2]]
    return {name: way for name, way in zip(parts[1::2], files, strict=True) if way}


ROW_TO_ROW = ways_of("From row to row")
WAYS = ROW_TO_ROW | ways_of("From a row to the gradient")


@pytest.mark.parametrize("name", WAYS)
def test_every_way_is_written_down_file_by_file(name: str) -> None:
    way = WAYS[name]
    assert [file for file in way if not (ROOT / file).is_file()] == []
    assert len(set(way)) == len(way)


def test_prompts_turns_and_validation_answers_have_a_way_each_to_the_same_sampling() -> None:
    assert list(WAYS) == [
        *("One prompt", "One turn of a conversation", "One answer of a validation", "From a row to the gradient")
    ]
    assert ROW_TO_ROW["One prompt"][0] == "controller/trainer.py"
    assert all("controller/sampling/stream.py" in way for way in WAYS.values())


@pytest.mark.parametrize("name", ROW_TO_ROW)
def test_a_way_from_row_to_row_opens_at_most_five_files_of_the_controller_each_named_in_one_before(name: str) -> None:
    """A file of the way is one that an earlier file imports, so that a reader finds it."""
    way = [file for file in ROW_TO_ROW[name] if file.startswith("controller/")]
    assert 1 < len(way) <= 5
    graph = imports({module_of(file): file.read_text() for file in product_files()})
    modules = [module_of(ROOT / file) for file in way]
    for number, module in enumerate(modules[1:], start=1):
        assert any(module in graph[earlier] for earlier in modules[:number]), module
