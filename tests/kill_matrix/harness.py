"""Runs on tiny models in which processes die at given points, and the state that they leave."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from splitppo.failpoints import FOLDER, passed_mark
from tests.kill_matrix.cells import Cell, debug
from tests.support.runs import Inputs, RunFolder, started

NUM_STEPS = 3
_POLL_INTERVAL_S = 0.05
_STUCK_S = 180.0


def matrix_config(inputs: Inputs, **services: Any) -> dict[str, Any]:
    """Three steps, two actor ranks, several mini-batches, a checkpoint after every step, a reward model."""
    config = {**inputs.config(), "run": {"total_steps": NUM_STEPS}}
    reward_model = {"model": str(inputs.folder / "reward"), "coef": 0.1}
    return with_incidents({**config, "reward_model": reward_model}, actor={"num_processes": 2}, **services)


def with_incidents(config: dict[str, Any], **services: Any) -> dict[str, Any]:
    """A run that recovers quickly, from the step before: no validation, a checkpoint after every step."""
    return {
        **config,
        "evaluation": {"test_freq": -1, "val_before_train": False},
        "checkpoint": {"save_freq": 1, "keep": 3},
        "services": {**config["services"], "restart_backoff_s": 0.1, **services},
    }


def with_models(config: dict[str, Any], overrides: Iterable[str]) -> list[str]:
    """Returns overrides in which {models} is the folder of the run's models."""
    return [override.replace("{models}", str(Path(config["actor"]["model"]).parent)) for override in overrides]


@dataclass(frozen=True)
class Fired:
    """One incident that has happened.

    Attributes:
        mark: what the failpoint has left behind: pid, rank, step, time.
        recovery_s: from then to the line of the step that was running.
    """

    mark: dict[str, Any]
    recovery_s: float


@dataclass(frozen=True)
class Verdict:
    """The outcome of a run with incidents.

    Attributes:
        fired: by the name of the cell.
        num_starts: of the controller, and of each group.
    """

    cells: Sequence[Cell]
    folder: RunFolder
    fired: Mapping[str, Fired]
    num_starts: Mapping[str, int]

    def failures(self, undisturbed: Mapping[str, str]) -> list[str]:
        """Returns the faults of a run; `undisturbed`: sha256 of each role's weights in a run without incidents."""
        steps = [step for step in self.folder.steps if step]  # 0: the validation before the first step
        num_steps = self.folder.summary["global_step"]
        found = {f"{cell.name}: nothing has happened": cell.name not in self.fired for cell in self.cells}
        found |= {
            f"steps {steps}": steps != list(range(1, num_steps + 1)),
            f"the weights differ: {self.folder.summary['weights_sha256']}, undisturbed {undisturbed}": (
                self.folder.summary["weights_sha256"] != undisturbed
            ),
            f"starts {dict(self.num_starts)}, expected {dict(self.expected_starts)}": (
                self.num_starts != self.expected_starts
            ),
        }
        return [what for what, is_so in found.items() if is_so]

    @property
    def expected_starts(self) -> Counter[str]:
        """Only what has ended is started again; the groups end with the controller that has started them."""
        starts = Counter(dict.fromkeys(self.num_starts, 1))
        for cell in self.cells:
            if cell.ends_process:
                starts.update(starts.keys() if cell.role == "controller" else [cell.role])
        return starts


def undisturbed_digests(config: dict[str, Any], folder: Path, *overrides: str) -> dict[str, str]:
    """The weights that a run ends with in which nobody dies."""
    shutil.rmtree(folder, ignore_errors=True)
    with started(config, folder, *with_models(config, overrides)) as controller:
        digests: dict[str, str] = controller.complete().summary["weights_sha256"]
    return digests


def replayed_digests(config: dict[str, Any], folder: Path, recorded: RunFolder, *overrides: str) -> dict[str, str]:
    """The weights of a run in which nobody dies, and that has the record of another run from its beginning."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(recorded.path / "episodes", folder / "episodes")
    record = {file.name: file.read_bytes() for file in (folder / "episodes").iterdir()}
    with started(config, folder, *overrides) as controller:
        digests: dict[str, str] = controller.complete().summary["weights_sha256"]
    assert {file.name: file.read_bytes() for file in (folder / "episodes").iterdir()} == record
    return digests


def run_cells(
    cells: Sequence[Cell], config: dict[str, Any], folder: Path, meanwhile: Callable[[RunFolder], None] = lambda _: None
) -> Verdict:
    """Runs to the end, with the controller started again whenever it dies; calls `meanwhile` all the time."""
    shutil.rmtree(folder, ignore_errors=True)
    config = {**config, "debug": debug(cells)}
    overrides = with_models(config, [override for cell in cells for override in (*cell.kind, *cell.overrides)])
    watch, num_starts = _Watch(cells, RunFolder(folder)), 0
    while True:
        num_starts += 1
        with started(config, folder, *overrides) as controller:
            while controller.process.poll() is None:
                watch.look()
                meanwhile(controller.folder)
                if watch.is_stuck:
                    raise TimeoutError(f"nothing has happened for {_STUCK_S:g} s:\n{controller.output}")
                time.sleep(_POLL_INTERVAL_S)
        if controller.process.returncode != -9 or num_starts > len(cells):
            break
    run = controller.complete()
    watch.look()
    starts = Counter({"controller": num_starts, **{role: len(ids) for role, ids in watch.instances.items()}})
    return Verdict(cells, run, watch.fired, starts)


class _Watch:
    """Follows a run from outside, by its files."""

    def __init__(self, cells: Iterable[Cell], folder: RunFolder) -> None:
        self._cells = cells
        self._folder = folder
        self._changed_at = time.monotonic()
        self._num_lines = 0
        self.instances: dict[str, set[str]] = defaultdict(set)
        self.fired: dict[str, Fired] = {}

    @property
    def is_stuck(self) -> bool:
        return time.monotonic() > self._changed_at + _STUCK_S

    def look(self) -> None:
        """Notes who serves, and which steps are done since incidents happened in them."""
        for role, instance_id in instances(self._folder).items():
            self.instances[role].add(instance_id)
        steps = self._folder.steps
        if len(steps) > self._num_lines:
            self._num_lines, self._changed_at = len(steps), time.monotonic()
        for cell in self._cells:
            if cell.from_outside:
                kill_from_outside(cell, self._folder)
            mark = fired_mark_of(cell, self._folder)
            if mark and cell.name not in self.fired and (cell.running or cell.step) in steps:
                self.fired[cell.name] = Fired(mark, time.time() - mark["unix_s"])


def instances(folder: RunFolder) -> dict[str, str]:
    """The instance id of each group, as in processes.json."""
    return {process["role"]: process["instance_id"] for process in folder.processes if process["instance_id"]}


def kill_from_outside(cell: Cell, folder: RunFolder) -> None:
    """Kills the victim of a cell once another process has passed the cell's point, and leaves a failpoint's mark."""
    mark = (
        folder.path / FOLDER / f"{cell.point or cell.name}.rank{cell.rank}.step{cell.step}.outside.{cell.action}.fired"
    )
    if mark.exists() or (cell.point and not (folder.path / FOLDER / passed_mark(cell.point, cell.step)).exists()):
        return
    pids = titled(cell.title, folder) if cell.title else folder.pids(cell.role)
    if len(pids) <= cell.rank:
        return
    pid = pids[cell.rank]
    os.kill(pid, signal.SIGKILL)
    mark.parent.mkdir(exist_ok=True)
    mark.write_text(json.dumps({"pid": pid, "rank": cell.rank, "step": cell.step, "unix_s": time.time()}))


def titled(title: str, folder: RunFolder) -> list[int]:
    """The pids of processes of a run with this in their command lines, parents before children."""
    controllers = folder.pids("controller")
    found = []
    for process in psutil.process_iter(["cmdline"]):
        command = " ".join(process.info["cmdline"] or ())
        if title in command and (f"{folder.path}/" in command or is_descendant(process, controllers)):
            found.append(process.pid)
    return found


def is_descendant(process: psutil.Process, pids: Iterable[int]) -> bool:
    """Whether one of these processes, or one that it has started, has started a process."""
    try:
        return any(parent.pid in pids for parent in process.parents())
    except psutil.NoSuchProcess:
        return False


def fired_mark_of(cell: Cell, folder: RunFolder) -> dict[str, Any] | None:
    """Returns the content of the file that the failpoint of a cell writes when it fires; None before."""
    pattern = f"{cell.point or cell.name}.rank{cell.rank}.step{cell.step}.*.{cell.action}.fired"
    marks = list((folder.path / FOLDER).glob(pattern))
    content: dict[str, Any] | None = json.loads(marks[0].read_text()) if marks else None
    return content
