"""Pair checkpoints: one part per trained role, and the controller's own state.

    checkpoints/global_step_N/{actor,critic}/   written by the services, in the background, manifest.json last
    checkpoints/global_step_N/controller.json   step, KL coefficient, validation before the run, totals
    checkpoints/global_step_N/COMMITTED         the commit marker: written last, when every part is durable
    checkpoints/latest                          newest committed step, for people; nothing reads it
    checkpoints/damaged_global_step_N           a checkpoint that was found damaged; left to the user

A folder without its marker is half a pair: never loaded, removed at the next start or commit. What a marker and the
manifests that it names do not describe is damaged; then the checkpoint before it is used.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from controller.commit_marker import CommitMarker, entry_of
from controller.files import write_atomically
from splitppo import failpoints
from splitppo.config import ConfigError
from splitppo.manifest import (
    MANIFEST,
    DamagedCheckpoint,
    Manifest,
    read_file,
    read_manifest,
    verify_digest,
    verify_files,
)

log = logging.getLogger(__name__)

MARKER = "COMMITTED"
STATE = "controller.json"
PREFIX = "global_step_"
DAMAGED_PREFIX = f"damaged_{PREFIX}"


class CheckpointStore:
    """The checkpoints folder of a run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def folder(self, step: int) -> Path:
        """Where the checkpoint of `step` lies."""
        return self.path / f"{PREFIX}{step}"

    def steps(self) -> list[int]:
        """Committed steps, oldest first."""
        return [step for step, folder in sorted(self._folders().items()) if (folder / MARKER).exists()]

    def _folders(self) -> dict[int, Path]:
        """Every checkpoint by its step, half pairs included."""
        folders = {folder.name.removeprefix(PREFIX): folder for folder in self.path.glob(f"{PREFIX}*")}
        return {int(number): folder for number, folder in folders.items() if number.isdigit()}

    def latest_step(self) -> int:
        """The newest committed step, 0 when there is none."""
        return max(self.steps(), default=0)

    def last_good(self) -> str:
        """Half a sentence on what a run that has to stop can go on from."""
        step = self.latest_step()
        if step == 0:
            return "there is no earlier checkpoint, the run would start again at step 0"
        return f"the last good checkpoint is {self.folder(step)}, which is untouched"

    # Whether a checkpoint is whole.

    def check(self, step: int) -> dict[str, Manifest]:
        """Compares what the controller has written, and the manifests, with the commit marker.

        The files that the manifests name are compared with them by the services, when they load.

        Returns:
            the manifests by role.

        Raises:
            DamagedCheckpoint: something is not as it was committed.
        """
        return check_folder(self.folder(step), step)

    def newest_whole_step(self, refuse: Callable[[int, DamagedCheckpoint], None] = lambda *_: None) -> int:
        """The newest step whose checkpoint passes `check`; what is newer is set aside. 0 when there is none.

        Args:
            refuse: called for a damaged checkpoint before that; what it raises leaves the checkpoint where it is.
        """
        while step := self.latest_step():
            try:
                self.check(step)
            except DamagedCheckpoint as error:
                refuse(step, error)
                self.set_aside(step, error)
            else:
                return step
        return 0

    def set_aside(self, step: int, error: DamagedCheckpoint) -> None:
        """Takes a damaged checkpoint out of the sequence, and warns. Nothing of it is removed."""
        aside = self.path / f"{DAMAGED_PREFIX}{step}"
        number = 1
        while aside.exists():
            number += 1
            aside = self.path / f"{DAMAGED_PREFIX}{step}.{number}"
        self.folder(step).rename(aside)
        before = self.latest_step()
        log.warning(
            "the checkpoint of step %d is damaged (%s) and was renamed to %s; the one before is used: %s",
            step,
            error,
            aside.name,
            f"step {before}" if before else "NONE IS LEFT, the run starts again at step 0 with the initial models",
        )

    # Reading and writing.

    def read_state(self, step: int) -> dict[str, Any]:
        """The controller's state at a committed step. DamagedCheckpoint if its file is torn."""
        state: dict[str, Any] = self._read(step)["state"]
        return state

    def read_metrics(self, step: int) -> dict[str, float]:
        """The metrics of a committed step."""
        metrics: dict[str, float] = self._read(step)["metrics"]
        return metrics

    def _read(self, step: int) -> dict[str, Any]:
        return _read_state_file(self.folder(step) / STATE)

    def commit(
        self,
        step: int,
        state: Mapping[str, Any],
        metrics: Mapping[str, float],
        *,
        manifests: Mapping[str, str],
        keep: int,
    ) -> None:
        """Makes the checkpoint of `step` count, after every role's part is durable; then removes the oldest.

        Args:
            step: of the checkpoint.
            state: the controller's part.
            metrics: of the step, so that a resumed run has no gap in them.
            manifests: sha256 of every role's manifest.
            keep: how many checkpoints stay.
        """
        folder = self.folder(step)
        content = json.dumps({"state": state, "metrics": metrics}, indent=2).encode()
        write_atomically(folder / STATE, content)
        failpoints.hit("save_checkpoint.writing", step)
        write_atomically(folder / MARKER, CommitMarker(step, entry_of(content), manifests).serialise())
        write_atomically(self.path / "latest", f"{step}\n")
        for old_step in self.steps()[:-keep]:
            self._remove(old_step)
        self.remove_leftovers()

    def remove_leftovers(self) -> list[int]:
        """Removes what was never committed, of whatever step; nothing may be saved at this time.

        Returns:
            the steps of half pairs.
        """
        halves = {step: folder for step, folder in self._folders().items() if not (folder / MARKER).exists()}
        for folder in halves.values():
            shutil.rmtree(folder, ignore_errors=True)
        for temporary in self.path.glob(".*.tmp"):
            temporary.unlink(missing_ok=True)
        return sorted(halves)

    def forget_after(self, step: int) -> None:
        """Removes checkpoints of later steps: a run that resumes from `step` writes them anew."""
        for later in self._folders():
            if later > step:
                self._remove(later)

    def _remove(self, step: int) -> None:
        """The marker goes first, so a removal that is cut short never leaves a checkpoint that looks whole."""
        (self.folder(step) / MARKER).unlink(missing_ok=True)
        shutil.rmtree(self.folder(step), ignore_errors=True)

    def adopt(self, folder: Path) -> int:
        """The step of a checkpoint folder; one of another run is copied (hard links) into this run first.

        Raises:
            ConfigError: the folder is no complete checkpoint.
            DamagedCheckpoint: it is complete, but not as it was written; nothing was copied.
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
        manifests = check_folder(folder, step)
        if folder.resolve() != self.folder(step).resolve():
            # Before one of this run's own goes: the services look only at the copy.
            for role, manifest in manifests.items():
                verify_files(folder / role, manifest)
            self._remove(step)
            # The marker last: a copy that is cut short never looks whole.
            without_marker = shutil.ignore_patterns(MARKER)
            shutil.copytree(
                folder, self.folder(step), ignore=without_marker, copy_function=_link_or_copy, dirs_exist_ok=True
            )
            write_atomically(self.folder(step) / MARKER, (folder / MARKER).read_bytes())
        return step


def check_folder(folder: Path, step: int) -> dict[str, Manifest]:
    """See `CheckpointStore.check`."""
    marker = CommitMarker.read(folder / MARKER, step)
    state = entry_of(read_file(folder / STATE))
    if state.size != marker.state.size:
        raise DamagedCheckpoint(f"{folder / STATE}: expected {marker.state.size} bytes, found {state.size}")
    verify_digest(folder / STATE, marker.state.sha256, state.sha256)
    return {role: _read_manifest(folder / role, digest) for role, digest in marker.manifests.items()}


def _read_manifest(part: Path, digest: str) -> Manifest:
    manifest = read_manifest(part)
    verify_digest(part / MANIFEST, digest, hashlib.sha256(manifest.serialise()).hexdigest())
    return manifest


def _read_state_file(file: Path) -> dict[str, Any]:
    try:
        part: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DamagedCheckpoint(f"{file}: expected the controller's state, it cannot be read") from error
    return part


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
