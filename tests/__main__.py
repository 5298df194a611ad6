"""python -m tests [--part first|rest] [-m EXPRESSION] [pytest's arguments]: the suite in stages, with their times and
slowest tests.

The first part is what is fast, and what shows a promise of the README (tests/support/promises.py); the rest is all
other tests. They run on two workers, file by file in the order of their names, and what needs another machine on one.
In one stage whole runs, which come last, took almost twice as long. With paths or options of pytest only these tests
are run, of whatever part, in one stage and one after another. With --seeds, the files that draw random models or inputs
are then run again with each of these seeds, without the long tests: no fact may depend on what one random model happens
to say.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from pathlib import Path

from tests.support.seeds import VARIABLE

TESTS = Path(__file__).parent
SEEDS = TESTS / "support" / "seeds.py"
GROUPS = TESTS / "integration"
WHOLE_RUNS = GROUPS / "runs"
# Files of many short tests come last, not those with a few long ones, at which one worker would wait for the other.
TWO_WORKERS = ("-n", "2", "--dist", "loadfile", "--no-loadscope-reorder")
# Models of tests are so small that a second thread only waits, and takes the core from the other worker.
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
PARTS = {"first": "(promise or not slow)", "rest": "(slow and not promise)"}
# pytest's: everything passed, or the expression deselects all of a stage; nothing can be run as it was asked for.
PASSED = (0, 5)
USAGE_ERROR = 4


def stages() -> dict[str, list[str]]:
    """Arguments of pytest by the name of the stage; together they are all of tests/ but tests/style, which `make check`
    runs (a test holds them to it).
    """
    groups = sorted(folder for folder in GROUPS.iterdir() if is_suite(folder) and folder != WHOLE_RUNS)
    on_two_workers = {
        "unit, golden, property": [TESTS / name for name in ("unit", "golden", "property")],
        "groups": groups,
        "whole runs and vLLM": [WHOLE_RUNS, TESTS / "vllm"],
    }
    alone = ("gpu", "rehearsal", "deployment", "slurm")
    return {
        **{name: [*TWO_WORKERS, *map(str, folders)] for name, folders in on_two_workers.items()},
        ", ".join(alone): [str(TESTS / name) for name in alone],
    }


def is_suite(folder: Path) -> bool:
    """Returns True if a folder has tests."""
    return folder.is_dir() and any(folder.glob("test_*.py"))


def stages_that_draw() -> dict[str, list[str]]:
    """The stages with those files alone that draw random models or inputs; a stage without such a file is left out."""
    found = {}
    for name, arguments in stages().items():
        folders = [Path(argument) for argument in arguments if Path(argument).is_dir()]
        files = [file for folder in folders for file in sorted(folder.rglob("test_*.py")) if draws(file)]
        if files:
            found[name] = [*(argument for argument in arguments if not Path(argument).is_dir()), *map(str, files)]
    return found


def draws(file: Path) -> bool:
    """Returns True if a test file, a fixture that it asks for, or what these import shifts its seeds."""
    known: set[Path] = set()
    left = [file, *(folder / "conftest.py" for folder in file.parents if folder.is_relative_to(TESTS))]
    asked_for = set(re.findall(r"[(,] *(\w+): ", file.read_text()))
    while left:
        source = left.pop()
        if source in known or not source.is_file():
            continue
        text = source.read_text()
        if source.name == "conftest.py" and asked_for.isdisjoint(re.findall(r"^def (\w+)", text, re.MULTILINE)):
            continue
        known.add(source)
        for module, names in re.findall(r"^ *from tests((?:\.\w+)*) import ([^\n]*)", text, re.MULTILINE):
            package = TESTS.joinpath(*module.split(".")[1:])
            left += [package.with_suffix(".py"), *(package / f"{name}.py" for name in re.findall(r"\w+", names))]
    return SEEDS in known


def main() -> int:
    """Runs every stage, whatever fails in another; returns 1 if one of them failed, or no test was run."""
    parser = argparse.ArgumentParser(prog="tests", description=__doc__, allow_abbrev=False)
    parser.add_argument("-m", dest="expression", default="not gpu and not docker", help="which tests, by their marks")
    parser.add_argument("--part", choices=PARTS, help="which part, where no tests are named; both together are all")
    parser.add_argument("--seeds", default="", help="other seeds of the random models of tests, as in 1,2,3")
    options, arguments = parser.parse_known_args()
    as_asked = {"the tests asked for": arguments}
    of_part = [PARTS[options.part]] if options.part and not arguments else []
    expression = " and ".join([f"({options.expression})", *of_part])
    runs = [(name, stage, expression, {}) for name, stage in (as_asked if arguments else stages()).items()]
    for seed in filter(None, options.seeds.split(",")):
        for name, stage in (as_asked if arguments else stages_that_draw()).items():
            runs.append(
                (f"{name}, {VARIABLE}={seed}", stage, f"({options.expression}) and not extended", {VARIABLE: seed})
            )
    took: list[str] = []
    has_failed = False
    for name, stage, expression, variables in runs:
        began_s = time.monotonic()
        command = [sys.executable, "-m", "pytest", "-m", expression, "--durations", "10", *stage]
        environment = ONE_THREAD | os.environ | variables
        code = subprocess.run(command, cwd=TESTS.parent, env=environment, check=False).returncode
        has_failed |= code not in PASSED
        if code != PASSED[1]:
            took.append(f"{time.monotonic() - began_s:6.0f} s  {name}{'' if code in PASSED else '  FAILED'}")
        if code == USAGE_ERROR:
            break
    sys.stdout.write("\n".join(["", "how long the tests took:", *took, ""]))
    return 1 if has_failed or not took else 0


if __name__ == "__main__":
    sys.exit(main())
