"""python -m benchmarks.startup: how long a run takes to start and to recover, with and without compiled bytecode.

It runs the first steps of the quickstart; the critic is killed in step 3. Rounds take turns. Without bytecode Python
compiles torch, transformers and the rest from source in every process. That happens if the installer has left no
bytecode, or PYTHONDONTWRITEBYTECODE kept it from being written.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from recipes.sort_letters.prepare import prepare
from splitppo.jsonl import read_jsonl

CONFIG = "recipes/sort_letters/cpu.yaml"
KILL_STEP = 3
FAILPOINT = f"{{critic.update.begin: {{step: {KILL_STEP}, action: kill}}}}"
OVERRIDES = (
    f"run.total_steps={KILL_STEP + 1}",
    "run.schedule=gather",
    "checkpoint.save_freq=1",
    "evaluation.val_before_train=false",
    "evaluation.min_accuracy=0",
    "evaluation.test_freq=-1",
    "services.restart_backoff_s=0.1",
    f"debug.failpoints={FAILPOINT}",
)
# Bytecode is neither read nor written: nothing can be below a file.
WITHOUT_BYTECODE = {"PYTHONPYCACHEPREFIX": "/dev/null/none", "PYTHONDONTWRITEBYTECODE": "1"}
FIGURES = ("both groups ready", "first step done", "from the kill to the next step")
TIMEOUT_S = 600.0
_POLL_INTERVAL_S = 0.02


def main() -> None:
    """Prints medians in seconds, and the time that bytecode saves."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    prepare()
    found: dict[bool, list[tuple[float, ...]]] = {True: [], False: []}
    for _ in range(options.rounds):
        for has_bytecode, figures in found.items():
            with tempfile.TemporaryDirectory("-startup") as folder:
                figures.append(time_run(Path(folder) / "run", has_bytecode=has_bytecode))
    print(f"{'medians, s':32s}{'without':>10s}{'with':>10s}{'ratio':>8s}")
    for index, name in enumerate(FIGURES):
        without, with_bytecode = (
            statistics.median(figures[index] for figures in found[has_bytecode]) for has_bytecode in (False, True)
        )
        print(f"{name:32s}{without:10.1f}{with_bytecode:10.1f}{with_bytecode / without:8.2f}")


def time_run(folder: Path, *, has_bytecode: bool) -> tuple[float, ...]:
    """Returns the figures of one run, in seconds."""
    environment = {name: value for name, value in os.environ.items() if name not in WITHOUT_BYTECODE}
    began_s = time.time()
    command = [sys.executable, "-m", "controller", "--config", CONFIG, f"run.dir={folder}", *OVERRIDES]
    process = subprocess.Popen(
        command,
        env=environment if has_bytecode else {**environment, **WITHOUT_BYTECODE},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        ready_s = moment(process, lambda: (folder / "processes.json").exists())
        first_s = moment(process, lambda: 1 in steps(folder))
        recovered_s = moment(process, lambda: KILL_STEP in steps(folder))
        if process.wait(TIMEOUT_S) != 0:
            raise RuntimeError(f"the run failed, exit {process.returncode}")
        [mark] = (folder / "failpoints").glob("*.fired")
        killed_s = json.loads(mark.read_text())["unix_s"]
    finally:
        process.kill()
        process.wait()
    return ready_s - began_s, first_s - began_s, recovered_s - killed_s


def moment(process: subprocess.Popen[bytes], has_come: Callable[[], Any]) -> float:
    """Returns the Unix seconds at which a condition becomes true."""
    deadline = time.monotonic() + TIMEOUT_S
    while not has_come():
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the run does not come so far, exit {process.poll()}")
        time.sleep(_POLL_INTERVAL_S)
    return time.time()


def steps(folder: Path) -> list[int]:
    """Returns the steps that are done, by the complete lines of metrics.jsonl."""
    file = folder / "metrics.jsonl"
    return [line["step"] for _, line in read_jsonl(file, until_torn=True)] if file.exists() else []


if __name__ == "__main__":
    main()
