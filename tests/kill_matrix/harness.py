"""Runs one cell: a whole run on tiny models in which one process dies, and what is found afterwards."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from splitppo.failpoints import FOLDER
from tests.kill_matrix.cells import Cell
from tests.runs import Inputs, RunFolder, started

NUM_STEPS = 3
_POLL_INTERVAL_S = 0.05
_CELL_TIMEOUT_S = 240.0
_ROLES = ("actor", "critic")


def matrix_config(inputs: Inputs, **services: Any) -> dict[str, Any]:
    """Three steps, two actor ranks, several mini-batches in both roles, a checkpoint after every step."""
    config = inputs.config()
    return {
        **config,
        "run": {"total_steps": NUM_STEPS},
        "actor": {**config["actor"], "ppo_epochs": 1},
        "critic": {**config["critic"], "ppo_epochs": 2, "ppo_mini_batch_size": 4},
        "evaluation": {"test_freq": -1, "val_before_train": False},
        "checkpoint": {"save_freq": 1, "keep": 10},
        "services": {**config["services"], "actor": {"num_processes": 2}, "restart_backoff_s": 0.1, **services},
    }


@dataclass(frozen=True)
class Verdict:
    """What became of a run in which one process was killed.

    Attributes:
        fired: the content of the failpoint's mark: pid, rank, step, time.
        steps: of metrics.jsonl.
        recovery_s: from the kill to the line of the step in which it happened.
        kept: roles whose group is the same as before.
        digests: sha256 of the weights of each role.
        num_starts: of the controller.
    """

    cell: Cell
    fired: dict[str, Any]
    steps: list[int]
    recovery_s: float
    kept: frozenset[str]
    digests: dict[str, str]
    num_starts: int

    @property
    def other_kept(self) -> bool | None:
        """Whether the group that was not killed is the same as before; None where the controller was killed."""
        return None if self.cell.role == "controller" else self.kept >= {*_ROLES} - {self.cell.role}

    def failures(self, undisturbed: dict[str, str]) -> list[str]:
        """What is not as it must be."""
        expected_starts = 2 if self.cell.role == "controller" else 1
        found = {
            "the failpoint fired at another step": self.fired["step"] not in self._expected_steps(),
            f"steps {self.steps}": self.steps != list(range(1, NUM_STEPS + 1)),
            "the weights differ": self.digests != undisturbed,
            "the group that was not killed was restarted": self.other_kept is False,
            f"the controller was started {self.num_starts} times": self.num_starts != expected_starts,
        }
        return [what for what, is_so in found.items() if is_so]

    def _expected_steps(self) -> list[int]:
        return [failpoint["step"] for failpoint in self.cell.debug["failpoints"].values()]


def undisturbed_digests(config: dict[str, Any], folder: Path) -> dict[str, str]:
    """The weights that a run ends with in which nobody dies."""
    with started(config, folder) as controller:
        digests: dict[str, str] = controller.complete().summary["weights_sha256"]
    return digests


def run_cell(
    cell: Cell, config: dict[str, Any], folder: Path, meanwhile: Callable[[RunFolder], None] = lambda _: None
) -> Verdict:
    """Runs to the end, with the controller started again if it is the one that dies; calls `meanwhile` all the time."""
    shutil.rmtree(folder, ignore_errors=True)
    config = {**config, "debug": cell.debug}
    num_starts, before, recovered_s = 0, {}, 0.0
    deadline = time.monotonic() + _CELL_TIMEOUT_S
    while True:
        num_starts += 1
        with started(config, folder, *cell.overrides) as controller:
            while controller.process.poll() is None:
                before = before or instances(controller.folder)
                meanwhile(controller.folder)
                fired = fired_marks(controller.folder)
                if fired and not recovered_s and fired[0]["step"] in controller.folder.steps:
                    recovered_s = time.time()
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{cell.name}: not done in {_CELL_TIMEOUT_S:g} s:\n{controller.output}")
                time.sleep(_POLL_INTERVAL_S)
        was_killed = cell.role == "controller" and controller.process.returncode == -9
        if not was_killed or num_starts > 1:
            break
    run = controller.complete()
    fired = fired_marks(run)
    if not fired:
        raise AssertionError(f"{cell.name}: nothing was killed")
    (mark,) = fired
    after = instances(run)
    return Verdict(
        cell=cell,
        fired=mark,
        steps=run.steps,
        recovery_s=(recovered_s or time.time()) - mark["unix_s"],
        kept=frozenset(role for role in _ROLES if before.get(role) == after.get(role)),
        digests=run.summary["weights_sha256"],
        num_starts=num_starts,
    )


def instances(folder: RunFolder) -> dict[str, str]:
    """The instance id of each group, as in processes.json."""
    return {one["role"]: one["instance_id"] for one in folder.processes if one["instance_id"]}


def fired_marks(folder: RunFolder) -> list[dict[str, Any]]:
    """What failpoints have left behind."""
    return [json.loads(mark.read_text()) for mark in (folder.path / FOLDER).glob("*.fired")]
