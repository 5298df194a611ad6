"""Rules for the tests: make runs each of them, every promise of the README has one, and none is skipped silently."""

from __future__ import annotations

import ast
import functools
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path

import pytest

from tests.__main__ import PARTS, stages, stages_that_draw
from tests.conftest import MAY_BE_SKIPPED_IN_CI, ON_ONE_WORKER, is_slow_by_kind, together
from tests.support import datasets, seeds
from tests.support.promises import PROMISES

ROOT = Path(__file__).parents[2]
FILES = sorted(file.relative_to(ROOT) for file in (ROOT / "tests").rglob("*.py"))
MARKS = ("docker", "extended", "gpu", "promise", "slow", "slurm", "vllm")
# Run by hand, on a machine that has one.
BY_HAND = ["-m", "gpu"]
# make check runs these; the stages are the others.
STYLE = Path("tests/style")


@functools.cache
def named_tests(file: Path) -> list[tuple[str, frozenset[str]]]:
    """(name, marks) of the tests of a file, read from the source."""
    return [*_named_tests(file)]


def files_of_stages() -> list[Path]:
    return [file for file in FILES if any(named_tests(file)) and not file.is_relative_to(STYLE)]


def _named_tests(file: Path) -> Iterator[tuple[str, frozenset[str]]]:
    tree = ast.parse((ROOT / file).read_text())
    assigned = [node for node in tree.body if isinstance(node, ast.Assign)]
    of_file = [node.value for node in assigned if ast.unparse(node.targets[0]) == "pytestmark"]
    of_all = marks(of_file) | ({"slow"} if is_slow_by_kind(ROOT / file) else set())
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
            tables = [mark for mark in node.decorator_list if ast.unparse(mark).startswith("pytest.mark.parametrize")]
            of_test = of_all | marks(mark for mark in node.decorator_list if mark not in tables)
            for of_some in {frozenset[str](), *(marks([row]) for table in tables for row in marked_rows(table))}:
                yield node.name, of_test | of_some


def marked_rows(table: ast.expr) -> Iterator[ast.Call]:
    """The rows of a mark `parametrize` that may have marks of their own."""
    for node in ast.walk(table):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.param":
            yield node


def marks(nodes: Iterable[ast.AST]) -> frozenset[str]:
    """The names of marks; of a mark `promise`, also "promise: WHICH"."""
    found = set()
    for node in chain.from_iterable(map(ast.walk, nodes)):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "pytest.mark":
            found.add(node.attr)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.promise":
            found.add(f"promise: {ast.literal_eval(node.args[0])}")
    return frozenset(found)


def commands() -> list[list[str]]:
    """Arguments of `python -m tests` and of pytest in every target of make that runs them, in both environments."""
    targets = re.findall(r"^(check|test[\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    found = []
    for target in targets:
        for settings in ([], ["VLLM=1"]):
            lines = subprocess.run(
                ["make", "--dry-run", "--no-print-directory", target, *settings],
                cwd=ROOT,
                env={"PATH": os.environ["PATH"]},
                capture_output=True,
                text=True,
                check=True,
            ).stdout.splitlines()
            run = (re.search(r"-m (?:tests|pytest) (.*)", line) for line in lines)
            found += [shlex.split(arguments[1]) for arguments in run if arguments]
    return found


def selects(arguments: list[str], file: Path, of_test: frozenset[str]) -> bool:
    folders = [argument for argument in arguments if argument.startswith("tests")]
    if folders and not any(file.is_relative_to(folder) for folder in folders):
        return False
    expressions = [arguments[arguments.index("-m") + 1]] if "-m" in arguments else []
    expressions += [PARTS[arguments[arguments.index("--part") + 1]]] if "--part" in arguments else []
    return all(eval(expression, {}, {mark: mark in of_test for mark in MARKS}) for expression in expressions)


def test_every_test_is_run_by_a_target_of_make_or_needs_a_gpu() -> None:
    runs = [*commands(), BY_HAND]
    assert len(runs) >= 5
    forgotten = [
        f"{file}::{name}"
        for file in FILES
        for name, of_test in named_tests(file)
        if not any(selects(arguments, file, of_test) for arguments in runs)
    ]
    assert forgotten == []


def test_make_test_shows_every_promise_of_the_readme() -> None:
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert {name: words for name, words in PROMISES.items() if words not in readme} == {}
    of_make_test = [arguments for arguments in commands() if "first" in arguments]
    assert len(of_make_test) == 2  # with and without vLLM
    marked, shown = set(), set()
    tests = [(file, of_test) for file in FILES for _, of_test in named_tests(file)]
    for file, of_test in tests:
        promised = {mark.removeprefix("promise: ") for mark in of_test if mark.startswith("promise: ")}
        marked |= promised
        if any(selects(arguments, file, of_test) for arguments in of_make_test):
            shown |= promised
    assert marked == {*PROMISES}
    assert shown == {*PROMISES}


@pytest.mark.parametrize("marked", [(), ("promise",), ("slow",), ("promise", "slow")])
def test_every_test_is_in_exactly_one_part(marked: tuple[str, ...]) -> None:
    chosen = [part for part in PARTS if selects(["--part", part], Path("tests/unit/test_a.py"), frozenset(marked))]
    assert len(chosen) == 1


def test_no_test_has_a_mark_that_its_folder_says() -> None:
    by_kind = [file for file in FILES if is_slow_by_kind(ROOT / file)]
    assert len(by_kind) > 50
    assert [file for file in by_kind if "pytest.mark.slow" in (ROOT / file).read_text()] == []


def test_tests_that_are_named_run_in_whatever_part_they_are(tmp_path: Path) -> None:
    (tmp_path / "test_named.py").write_text("import pytest\n@pytest.mark.slow\ndef test_it(): pass")
    command = [sys.executable, "-m", "tests", "--part", "first", str(tmp_path), "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "CI": ""}, capture_output=True, text=True, check=False)
    assert (done.returncode, "1 passed" in done.stdout) == (0, True)


def test_the_stages_are_all_tests_each_once() -> None:
    paths = [Path(argument).relative_to(ROOT) for stage in stages().values() for argument in stage if "/" in argument]
    of_file = {file: [path for path in paths if file.is_relative_to(path)] for file in files_of_stages()}
    assert len(of_file) > 100
    assert {str(file): found for file, found in of_file.items() if len(found) != 1} == {}


def test_the_files_that_draw_are_those_that_import_the_seeds_or_ask_for_a_fixture_that_does() -> None:
    drawing = stages_that_draw()
    files = {Path(argument).relative_to(ROOT) for stage in drawing.values() for argument in stage if "/" in argument}
    of_stages = {name: [argument for argument in stage if "/" not in argument] for name, stage in stages().items()}
    assert {
        name: [argument for argument in stage if "/" not in argument] for name, stage in drawing.items()
    } == of_stages
    assert {file for file in files_of_stages() if "import shifted" in (ROOT / file).read_text()} <= files
    for name, draws in {
        "unit/engine/test_train_engine.py": True,  # imports tests.support.models
        "unit/actor/test_role.py": True,  # asks for the model of tests/unit/conftest.py
        "integration/runs/test_schedules.py": True,  # asks for runs of the conftest.py beside it
        "style/test_makefile.py": False,
        "unit/test_end_reason.py": False,
    }.items():
        assert (Path("tests", name) in files) == draws, name


def test_the_variable_shifts_every_seed_by_more_than_tests_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(seeds.VARIABLE, raising=False)
    assert [seeds.shifted(seed) for seed in (0, 7)] == [0, 7]
    monkeypatch.setenv(seeds.VARIABLE, "2")
    assert [seeds.shifted(seed) for seed in (0, 7)] == [2000, 2007]
    monkeypatch.setenv(seeds.VARIABLE, "-1")
    with pytest.raises(ValueError, match="SPLITPPO_TEST_SEED is '-1': expected a whole number, 0 or more"):
        seeds.shifted(0)


def test_files_are_called_test_exactly_if_they_hold_tests() -> None:
    with_tests = [file for file in FILES if any(named_tests(file))]
    assert with_tests == [file for file in FILES if file.name.startswith("test_")]


def test_what_may_be_skipped_is_still_there() -> None:
    names = [f"{file}::{name}" for file in FILES for name, _ in named_tests(file)]
    for start, _ in MAY_BE_SKIPPED_IN_CI:
        assert any(name.startswith(start) for name in names), start


SKIPS = {
    "test_a_test.py": "import pytest\ndef test_it(): pytest.skip('no such luck')",
    "test_a_mark.py": "import pytest\n@pytest.mark.skipif(True, reason='no such luck')\ndef test_it(): pass",
    "test_a_module.py": "import pytest\npytest.importorskip('there_is_no_such_module', reason='no such luck')",
    "test_an_expected_failure.py": (
        "import pytest\n@pytest.mark.xfail(reason='no such luck')\ndef test_it(): raise ValueError"
    ),
}
RUNS = {"test_that_runs.py": "def test_it(): pass"}


def run_pytest(
    folder: Path, files: dict[str, str], *arguments: str, ci: str, data: str = "."
) -> subprocess.CompletedProcess[str]:
    for name, source in files.items():
        (folder / name).write_text(source)
    (folder / "pytest.ini").touch()  # its own root
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider", *arguments]
    environment = {**os.environ, "CI": ci, datasets.VARIABLE: data, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("arguments", [[], ["-n", "1"]], ids=["one process", "parallel workers"])
def test_whatever_is_skipped_in_ci_fails_the_run_with_its_name_and_reason(tmp_path: Path, arguments: list[str]) -> None:
    done = run_pytest(tmp_path, SKIPS | RUNS, *arguments, ci="true")
    assert done.returncode == 1
    named = re.findall(r"^(\w+\.py)\S*: .*no such luck$", done.stdout, re.MULTILINE)
    assert sorted(named) == sorted(SKIPS)


@pytest.mark.parametrize(("files", "ci"), [(SKIPS | RUNS, ""), (RUNS, "true")], ids=["outside CI", "nothing"])
def test_otherwise_it_is_green(tmp_path: Path, files: dict[str, str], ci: str) -> None:
    assert run_pytest(tmp_path, files, ci=ci).returncode == 0


def test_what_is_left_out_for_a_mark_is_told_with_the_command_that_runs_it(tmp_path: Path) -> None:
    marked = "import pytest\n@pytest.mark.extended\ndef test_it(): pass"
    done = run_pytest(tmp_path, {"test_long.py": marked, **RUNS}, "-m", "not extended", ci="")
    assert done.returncode == 0
    assert "\nleft out: 1 tests marked extended (make test-slow, or name their files)\n" in done.stdout
    done = run_pytest(tmp_path, {}, "-m", "not extended", "-k", "that_runs", ci="")
    assert "left out" not in done.stdout


@pytest.mark.parametrize("arguments", [[], ["-n", "1"]], ids=["one process", "parallel workers"])
@pytest.mark.parametrize("data", ["/there/is/none", pytest.param("", marks=pytest.mark.extended)])
def test_without_data_sets_ci_fails_with_one_sentence(tmp_path: Path, arguments: list[str], data: str) -> None:
    done = run_pytest(tmp_path, RUNS, *arguments, ci="true", data=data)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert re.findall(rf"^ERROR: {datasets.VARIABLE} is .*: expected the folder of .*$", done.stderr, re.MULTILINE)
    assert done.stdout == ""
    assert run_pytest(tmp_path, RUNS, *arguments, ci="", data=data).returncode == 0


def parameters(file: Path) -> set[str]:
    """The fixtures of other files that the functions of a file ask for."""
    functions = [node for node in ast.walk(ast.parse((ROOT / file).read_text())) if isinstance(node, ast.FunctionDef)]
    return {argument.arg for node in functions for argument in node.args.args} - {node.name for node in functions}


def test_files_that_share_groups_come_to_one_worker() -> None:
    named = [Path(file) for folder in ON_ONE_WORKER for file in together(folder)]
    assert {*named} <= {*FILES}
    of_groups = {"completed", "groups", "one_rank", "stale", "stopped", "unstreamed"}
    runs = [file for file in FILES if file.match("tests/integration/runs/test_*.py")]
    assert [file for file in runs if parameters(file) & of_groups and file not in named] == []
