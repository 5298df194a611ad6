"""python -m tests [-m EXPRESSION] [pytest's arguments]: the suite in stages, with their times and slowest tests.

They run on two workers, file by file in the order of their names, and what needs another machine on one. In one stage
whole runs, which come last, took almost twice as long. With paths or options of pytest only these tests are run, in one
stage and one after another.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

TESTS = Path(__file__).parent
GROUPS = TESTS / "integration"
WHOLE_RUNS = GROUPS / "runs"
# Files of many short tests come last, not those with a few long ones, at which one worker would wait for the other.
TWO_WORKERS = ("-n", "2", "--dist", "loadfile", "--no-loadscope-reorder")
# Models of tests are so small that a second thread only waits, and takes the core from the other worker.
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
# pytest's: everything passed, or the expression deselects all of a stage; nothing can be run as it was asked for.
PASSED = (0, 5)
USAGE_ERROR = 4


def stages() -> dict[str, list[str]]:
    """Arguments of pytest by the name of the stage; together they are all of tests/ (a test holds them to it)."""
    groups = sorted(folder for folder in GROUPS.iterdir() if is_suite(folder) and folder != WHOLE_RUNS)
    on_two_workers = {
        "unit, golden, property": [TESTS / name for name in ("unit", "golden", "property")],
        "groups": groups,
        "whole runs and vLLM": [WHOLE_RUNS, TESTS / "vllm"],
    }
    alone = ("gpu", "deployment", "slurm")
    return {
        **{name: [*TWO_WORKERS, *map(str, folders)] for name, folders in on_two_workers.items()},
        ", ".join(alone): [str(TESTS / name) for name in alone],
    }


def is_suite(folder: Path) -> bool:
    """Returns True if a folder has tests."""
    return folder.is_dir() and any(folder.glob("test_*.py"))


def main() -> int:
    """Runs every stage, whatever fails in another; returns 1 if one of them failed, or no test was run."""
    parser = argparse.ArgumentParser(prog="tests", description=__doc__, allow_abbrev=False)
    parser.add_argument("-m", dest="expression", default="not gpu and not docker", help="which tests, by their marks")
    options, arguments = parser.parse_known_args()
    asked = {"the tests asked for": arguments} if arguments else stages()
    took: list[str] = []
    has_failed = False
    for name, stage in asked.items():
        began_s = time.monotonic()
        command = [sys.executable, "-m", "pytest", "-m", options.expression, "--durations", "10", *stage]
        code = subprocess.run(command, cwd=TESTS.parent, env=ONE_THREAD | os.environ, check=False).returncode
        has_failed |= code not in PASSED
        if code != PASSED[1]:
            took.append(f"{time.monotonic() - began_s:6.0f} s  {name}{'' if code in PASSED else '  FAILED'}")
        if code == USAGE_ERROR:
            break
    sys.stdout.write("\n".join(["", "how long the tests took:", *took, ""]))
    return 1 if has_failed or not took else 0


if __name__ == "__main__":
    sys.exit(main())
