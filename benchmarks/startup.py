"""python -m benchmarks.startup: how long a run takes to start and to recover, with and without compiled bytecode.

It runs the first steps of the quickstart, by default with two ranks for each group; the critic's rank 0 is killed in
step 3. Rounds take turns. Without bytecode Python compiles torch, transformers and the rest from source in every
process. Bytecode is missing if the installer has left none, or PYTHONDONTWRITEBYTECODE kept it from being written.

`--beside FOLDER` compares with the code in another folder instead, both with bytecode.
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
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from recipes.sort_letters.prepare import prepare
from splitppo.run_folder.events import read_events
from splitppo.run_folder.step_file import METRICS_FILE, read_metrics

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
FIGURES = (
    "both groups ready",
    "first step done",
    "from the kill to the next step",
    "  until the loss is noticed",
    "  until the group has loaded its state again",
    "  until the step is done",
    "MiB that the groups have in main memory",
    "  of them shared by several of their processes",
)
HERE = Path(__file__).resolve().parents[1]
TIMEOUT_S = 600.0
_POLL_INTERVAL_S = 0.02


def main() -> None:
    """Prints medians in seconds, and the time that bytecode saves."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=2, help="of each group")
    parser.add_argument("--beside", type=Path, help="a folder with other code")
    options = parser.parse_args()
    prepare()
    sides = [Side("without", HERE, WITHOUT_BYTECODE), Side("with", HERE, {})]
    if options.beside:
        sides = [Side("beside", options.beside.resolve(), {}), Side("here", HERE, {})]
    found: list[list[tuple[float, ...]]] = [[] for _ in sides]
    for _ in range(options.rounds):
        for side, figures in zip(sides, found, strict=True):
            with tempfile.TemporaryDirectory("-startup") as folder:
                figures.append(time_run(Path(folder) / "run", side, options.ranks))
    print(f"{'medians; seconds, if not MiB':46s}{sides[0].name:>10s}{sides[1].name:>10s}{'ratio':>8s}")
    for index, name in enumerate(FIGURES):
        first, second = (statistics.median(figures[index] for figures in of_side) for of_side in found)
        print(f"{name:46s}{first:10.1f}{second:10.1f}{second / first:8.2f}")


@dataclass(frozen=True)
class Side:
    """One side of the comparison: the code in a folder, and its environment."""

    name: str
    code: Path
    environment: dict[str, str]


def time_run(folder: Path, side: Side, num_ranks: int) -> tuple[float, ...]:
    """Returns the figures of one run, in seconds."""
    environment = {name: value for name, value in os.environ.items() if name not in WITHOUT_BYTECODE}
    ranks = [f"services.{role}.num_processes={num_ranks}" for role in ("actor", "critic")]
    made = HERE / ".cache/sort_letters"
    inputs = {"data.train_files": "train.parquet", "data.val_files": "val.parquet", "actor.model": "model"}
    paths = [f"{key}={made / name}" for key, name in inputs.items()]
    began_s = time.time()
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "controller",
            "--config",
            str(HERE / CONFIG),
            f"run.dir={folder}",
            *OVERRIDES,
            *paths,
            *ranks,
        ],
        cwd=side.code,
        env={**environment, **side.environment},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        ready_s = moment(process, lambda: (folder / "processes.json").exists())
        first_s = moment(process, lambda: 1 in steps(folder))
        memory = memory_of_groups(process.pid)
        recovered_s = moment(process, lambda: KILL_STEP in steps(folder))
        if process.wait(TIMEOUT_S) != 0:
            raise RuntimeError(f"the run failed, exit {process.returncode}")
        [mark] = (folder / "failpoints").glob("*.fired")
        killed_s = json.loads(mark.read_text())["unix_s"]
    finally:
        process.kill()
        process.wait()
    events = {event["kind"]: event["unix_s"] for event in read_events(folder)}
    lost_s = events["group_lost"]
    loaded_s = events["recovered"]
    parts = lost_s - killed_s, loaded_s - lost_s, recovered_s - loaded_s
    return ready_s - began_s, first_s - began_s, recovered_s - killed_s, *parts, *memory


def memory_of_groups(controller_pid: int) -> tuple[float, float]:
    """Returns the memory of the groups' processes in MiB, each page counted once, and the part that several have."""
    once = 0.0
    shared = 0.0
    for process in psutil.Process(controller_pid).children(recursive=True):
        with suppress(psutil.Error):
            if "services." in " ".join(process.cmdline()):
                memory = process.memory_full_info()
                once += memory.pss / 2**20
                shared += (memory.pss - memory.uss) / 2**20
    return once, shared


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
    return [line["step"] for line in read_metrics(folder / METRICS_FILE)]


if __name__ == "__main__":
    main()
