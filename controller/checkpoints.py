"""Pair checkpoints: one part per trained role, and the controller's own state.

    checkpoints/global_step_N/{actor,critic}/   written by the services, in the background
    checkpoints/global_step_N/controller.json   step, KL coefficient, validation before the run, totals
    checkpoints/global_step_N/COMMITTED         the commit marker: written last, when every part is durable
    checkpoints/latest                          newest committed step

A folder without its marker is half a pair: never loaded, removed when the next checkpoint commits.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from controller.files import write_atomically
from splitppo.config import ConfigError

log = logging.getLogger(__name__)

MARKER = "COMMITTED"
STATE = "controller.json"
PREFIX = "global_step_"


class CheckpointStore:
    """The checkpoints folder of a run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def folder(self, step: int) -> Path:
        """Where the checkpoint of `step` lies."""
        return self.path / f"{PREFIX}{step}"

    def steps(self) -> list[int]:
        """Committed steps, oldest first."""
        folders = [marker.parent.name for marker in self.path.glob(f"{PREFIX}*/{MARKER}")]
        return sorted(int(name.removeprefix(PREFIX)) for name in folders if name.removeprefix(PREFIX).isdigit())

    def latest_step(self) -> int:
        """The newest committed step, 0 when there is none."""
        return max(self.steps(), default=0)

    def read_state(self, step: int) -> dict[str, Any]:
        """The controller's state at a committed step. ConfigError if its file is torn."""
        state: dict[str, Any] = self._read(step)["state"]
        return state

    def read_metrics(self, step: int) -> dict[str, float]:
        """The metrics of a committed step."""
        metrics: dict[str, float] = self._read(step)["metrics"]
        return metrics

    def _read(self, step: int) -> dict[str, Any]:
        file = self.folder(step) / STATE
        try:
            part: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"the checkpoint of step {step} is torn: {file} cannot be read") from error
        return part

    def commit(self, step: int, state: Mapping[str, Any], metrics: Mapping[str, float], *, keep: int) -> None:
        """Makes the checkpoint of `step` count, after every role's part is durable; then removes the oldest."""
        folder = self.folder(step)
        write_atomically(folder / STATE, json.dumps({"state": state, "metrics": metrics}, indent=2))
        write_atomically(folder / MARKER, f"{step}\n")
        write_atomically(self.path / "latest", f"{step}\n")
        for old_step in self.steps()[:-keep]:
            self._remove(old_step)
        for half in self.path.glob(f"{PREFIX}*"):
            name = half.name.removeprefix(PREFIX)
            if name.isdigit() and int(name) < step and not (half / MARKER).exists():
                shutil.rmtree(half, ignore_errors=True)

    def forget_after(self, step: int) -> None:
        """Removes checkpoints of later steps: a run that resumes from `step` writes them anew."""
        for folder in self.path.glob(f"{PREFIX}*"):
            name = folder.name.removeprefix(PREFIX)
            if name.isdigit() and int(name) > step:
                self._remove(int(name))

    def _remove(self, step: int) -> None:
        """The marker goes first, so a removal that is cut short never leaves a checkpoint that looks whole."""
        (self.folder(step) / MARKER).unlink(missing_ok=True)
        shutil.rmtree(self.folder(step), ignore_errors=True)

    def adopt(self, folder: Path) -> int:
        """The step of a checkpoint folder; one of another run is copied (hard links) into this run first.

        Raises:
            ConfigError: the folder is no complete checkpoint.
        """
        name = folder.resolve().name
        number = name.removeprefix(PREFIX)
        is_complete = (folder / MARKER).exists() and (folder / STATE).exists()
        if not name.startswith(PREFIX) or not number.isdigit() or not is_complete:
            raise ConfigError(
                f"run.resume: {folder} is no complete checkpoint; expected auto, disable or a folder"
                f" {PREFIX}N with the files {STATE} and {MARKER}"
            )
        step = int(number)
        if folder.resolve() != self.folder(step).resolve():
            self._remove(step)
            # The marker last: a copy that is cut short never looks whole.
            without_marker = shutil.ignore_patterns(MARKER)
            shutil.copytree(
                folder, self.folder(step), ignore=without_marker, copy_function=_link_or_copy, dirs_exist_ok=True
            )
            write_atomically(self.folder(step) / MARKER, f"{step}\n")
        return step


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
