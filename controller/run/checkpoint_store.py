"""Reads, commits and removes pair checkpoints: one part per trained role, and the state of the controller.

    checkpoints/global_step_N/{actor,critic}/   written by the services, in the background, manifest.json last
    checkpoints/global_step_N/controller.json   step, KL coefficient, validation before the run, totals
    checkpoints/global_step_N/COMMITTED         the commit marker: written last, when every part is durable
    checkpoints/latest                          newest committed step, for people; the program does not read it
    checkpoints/best                            link to the best checkpoint, by checkpoint.best_metric; likewise
    checkpoints/damaged_global_step_N           a damaged checkpoint, set aside for the user

A folder without its marker is half a pair: it is never loaded, and removed at the next start or commit. A checkpoint is
damaged if its files are not as its marker and manifests describe them. Then the checkpoint before it is used.
"""

import json
import logging
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from controller.run.state import RunState
from splitppo import failpoints
from splitppo.atomic_write import write_atomically
from splitppo.config import ConfigError
from splitppo.hard_link import link_or_copy
from splitppo.manifest import (
    DamagedCheckpoint,
    FileEntry,
    Manifest,
    SealedFile,
    read_manifest,
    verify_file,
    verify_files,
)
from splitppo.plain_file import read_plain

log = logging.getLogger(__name__)

MARKER = "COMMITTED"
STATE = "controller.json"
ROLLOUTS = "rollouts.safetensors"
PREFIX = "global_step_"
DAMAGED_PREFIX = f"damaged_{PREFIX}"
_NUMBER = re.compile(r"0|[1-9][0-9]*")


class ControllerPart(BaseModel):
    """The content of controller.json in a checkpoint: the controller's state, and the metrics of the step."""

    state: RunState
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class CommitMarker(SealedFile):
    """The file COMMITTED, which makes a checkpoint valid: it has the step, and the digests of the other files.

    Attributes:
        state: size and sha256 of the controller's part, controller.json.
        manifests: sha256 of manifest.json, by role.
        run_id: the run that saved or adopted the checkpoint; empty in checkpoints of an older version.
        adopted_from: the folder and run from which `run.resume` took the checkpoint.
        rollouts: size and sha256 of the finished rollouts of the next step, rollouts.safetensors; None without them.
    """

    KIND = "commit marker"
    step: int
    state: FileEntry
    manifests: Mapping[str, str]
    run_id: str = ""
    adopted_from: str = ""
    rollouts: FileEntry | None = None


class CheckpointStore:
    """Reads, writes and removes the pair checkpoints in the folder `checkpoints` of a run.

    Attributes:
        run_id: the id of the run, which is written into its checkpoints; empty in tools that only read.
    """

    def __init__(self, path: Path, run_id: str = "") -> None:
        self.path = path
        self.run_id = run_id
        self._adopted: tuple[int, Path] | None = None

    def folder(self, step: int) -> Path:
        """Returns the path of the folder for the checkpoint of `step`, whether it exists or not."""
        return self.path / f"{PREFIX}{step}"

    def steps(self) -> list[int]:
        """Returns the steps that have a committed checkpoint, oldest first."""
        return [step for step, folder in sorted(self._folders().items()) if (folder / MARKER).exists()]

    def incomplete_steps(self) -> list[int]:
        """Returns the steps whose checkpoint was begun and not committed, oldest first."""
        return sorted(step for step, folder in self._folders().items() if not (folder / MARKER).exists())

    def _folders(self) -> dict[int, Path]:
        folders = {folder.name.removeprefix(PREFIX): folder for folder in self.path.glob(f"{PREFIX}*")}
        return {int(number): folder for number, folder in folders.items() if _NUMBER.fullmatch(number)}

    def latest_step(self) -> int:
        """Returns the step of the newest committed checkpoint, 0 if there is no checkpoint."""
        return max(self.steps(), default=0)

    def way_to_others(self, what: str) -> str:
        """Returns the text that ends the error for changed keys or rows of a resumed run: how to start a new one."""
        start = f" run.resume={self.folder(step)}" if (step := self.latest_step()) else ""
        return f"a resumed run keeps these {what}, a new run may change them: run.dir=NEW{start}"

    def last_good(self) -> str:
        """Returns the text that ends an error message: the newest checkpoint, from which the run can be resumed."""
        step = self.latest_step()
        if step == 0:
            return "there is no earlier checkpoint, the run would start again at step 0"
        return f"the last good checkpoint is {self.folder(step)}, which is untouched"

    def check(self, step: int, folder: Path | None = None) -> dict[str, Manifest]:
        """Checks a checkpoint's files against its commit marker; returns the manifests of the roles' parts.

        The controller's part is compared, too. The services compare the files that the manifests name when they load
        them. `folder` is that of another run's checkpoint.

        Raises:
            DamagedCheckpoint: a file is not as it was committed.
            ConfigError: the checkpoint lies in this run folder, but another run has saved it.
        """
        is_here = folder is None
        folder = folder or self.folder(step)
        marker = CommitMarker.read(folder / MARKER)
        if marker.step != step:
            expected = f"expected the commit marker of step {step}"
            raise DamagedCheckpoint(f"{folder / MARKER}: {expected}, found {marker.step}")
        verify_file(folder / STATE, marker.state)
        if marker.rollouts is not None:
            verify_file(folder / ROLLOUTS, marker.rollouts)
        if is_here and self._is_foreign(marker):
            raise ConfigError(
                f"run.dir: {folder} is a checkpoint of run {marker.run_id}, this is run {self.run_id}: remove it, or"
                f" adopt it with run.resume={folder}"
            )
        return {role: read_manifest(folder / role, sha256) for role, sha256 in marker.manifests.items()}

    def _is_foreign(self, marker: CommitMarker) -> bool:
        return bool(self.run_id) and marker.run_id not in ("", self.run_id)

    def newest_whole_step(self) -> int:
        """Returns the step of the newest checkpoint that passes `check`, or 0; renames newer ones as damaged."""
        while step := self.latest_step():
            try:
                self.check(step)
                break
            except DamagedCheckpoint as error:
                self.set_aside(step, error)
        return step

    def load(self, step: int) -> ControllerPart:
        """Parses the controller's part of a checkpoint; ConfigError if it is not valid, e.g. of another version."""
        folder = self.folder(step)
        try:
            return ControllerPart.model_validate_json(read_plain(folder / STATE))
        except ValidationError as error:
            first = error.errors()[0]
            reason = f"{'.'.join(map(str, first['loc'])) or 'the file'}: {first['msg']}"
            why = f"its {STATE} is not what this version writes: {reason}"
            raise ConfigError(f"the checkpoint {folder} cannot be used, {why}") from error

    def rollouts(self, step: int) -> bytes | None:
        """Reads the finished rollouts of the step after `step` from its checkpoint; None if the checkpoint has none.

        Rollouts that another run has sampled are not used, because its prompts, rewards and sampling may be different.
        """
        has_rollouts = CommitMarker.read(self.folder(step) / MARKER).rollouts is not None
        return read_plain(self.folder(step) / ROLLOUTS) if has_rollouts else None

    def set_aside(self, step: int, error: DamagedCheckpoint) -> None:
        """Renames a damaged checkpoint and logs a warning; ConfigError if `run.resume` named this checkpoint."""
        if self._adopted is not None and step == self._adopted[0]:
            raise _named_is_damaged(self._adopted[1], error) from error
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

    def commit(
        self,
        step: int,
        state: Mapping[str, Any],
        metrics: Mapping[str, float],
        *,
        manifests: Mapping[str, str],
        keep: int | None,
        best: int | None = None,
        rollouts: bytes | None = None,
    ) -> None:
        """Commits the checkpoint of `step` after every role's part is durable: writes controller.json, then the marker.

        Afterwards only the newest `keep` checkpoints remain, and that of step `best`. `manifests` has the sha256 of
        each role's manifest; `rollouts` are the finished rollouts of the next step.
        """
        folder = self.folder(step)
        content = json.dumps({"state": state, "metrics": metrics}, indent=2).encode()
        write_atomically(folder / STATE, content)
        failpoints.hit("save_checkpoint.writing", step)
        if rollouts is not None:
            write_atomically(folder / ROLLOUTS, rollouts)
        entry = FileEntry.of(rollouts) if rollouts is not None else None
        marker = CommitMarker(step, FileEntry.of(content), manifests, self.run_id, rollouts=entry)
        write_atomically(folder / MARKER, marker.serialise())
        write_atomically(self.path / "latest", f"{step}\n")
        self._mark_best(best)
        for old_step in self.steps()[:-keep] if keep else ():
            if old_step != best:
                self._remove(old_step)
        self.remove_leftovers()

    def _mark_best(self, step: int | None) -> None:
        """Makes `best` a link to the checkpoint of `step`, or removes the link if there is no such checkpoint."""
        link = self.path / "best"
        new_link = self.path / ".best.tmp"
        if step not in self.steps():
            link.unlink(missing_ok=True)
            return
        new_link.unlink(missing_ok=True)
        new_link.symlink_to(f"{PREFIX}{step}")
        new_link.replace(link)

    def remove_leftovers(self) -> list[int]:
        """Removes temporary files and uncommitted checkpoints, whose steps it returns. No save may run meanwhile."""
        halves = self.incomplete_steps()
        for step in halves:
            shutil.rmtree(self.folder(step), ignore_errors=True)
        for temporary in self.path.glob(".*.tmp"):
            temporary.unlink(missing_ok=True)
        return halves

    def forget_after(self, step: int) -> None:
        """Removes the checkpoints of steps after `step`: a run that resumes from `step` writes them again."""
        for later in self._folders():
            if later > step:
                self._remove(later)
        if not (self.path / "best").exists():  # it led to one of them
            (self.path / "best").unlink(missing_ok=True)

    def _remove(self, step: int) -> None:
        """Removes a checkpoint, first its commit marker, so that a half-removed checkpoint never counts as complete."""
        (self.folder(step) / MARKER).unlink(missing_ok=True)
        shutil.rmtree(self.folder(step), ignore_errors=True)

    def adopt(self, folder: Path) -> int:
        """Copies the checkpoint that `run.resume` names into this run, unless it is there already; returns its step.

        The copy consists of hard links if possible.

        Raises:
            ConfigError: the folder is no complete checkpoint, or not as it was written; then nothing was copied.
        """
        step = named_step(folder)
        try:
            manifests = self.check(step, folder)
            if folder.resolve() != self.folder(step).resolve():
                # Before one of this run's own goes: the services look only at the copy.
                for role, manifest in manifests.items():
                    verify_files(folder / role, manifest)
                self._copy(folder, step)
            elif self._is_foreign(CommitMarker.read(folder / MARKER)):
                self._mark_adopted(folder, step)
        except DamagedCheckpoint as error:
            raise _named_is_damaged(folder, error) from error
        self._adopted = step, folder
        return step

    def _copy(self, folder: Path, step: int) -> None:
        """Replaces the checkpoint of `step` by a copy, whose marker comes last: a half-made copy is never used."""
        self._remove(step)
        target = self.folder(step)
        without_marker = shutil.ignore_patterns(MARKER)
        shutil.copytree(folder, target, ignore=without_marker, copy_function=link_or_copy, dirs_exist_ok=True)
        self._mark_adopted(folder, step)

    def _mark_adopted(self, folder: Path, step: int) -> None:
        """Writes the marker of a checkpoint copied from another run, with this run's id and the original folder."""
        marker = CommitMarker.read(folder / MARKER)
        origin = f"{folder.resolve()}, run {marker.run_id or 'unknown'}"
        rollouts = marker.rollouts if marker.run_id == self.run_id else None
        adopted = replace(marker, run_id=self.run_id, adopted_from=origin, rollouts=rollouts)
        write_atomically(self.folder(step) / MARKER, adopted.serialise())
        log.info("adopted the checkpoint of step %d from %s", step, origin)


def named_step(folder: Path) -> int:
    """Parses the step from the checkpoint folder that `run.resume` names; ConfigError unless it is complete."""
    prefix, _, number = folder.resolve().name.partition(PREFIX)
    is_complete = (folder / MARKER).exists() and (folder / STATE).exists()
    if prefix or not _NUMBER.fullmatch(number) or not is_complete:
        raise ConfigError(
            f"run.resume: {folder} is no complete checkpoint; expected auto, disable or a folder"
            f" {PREFIX}N with the files {STATE} and {MARKER}"
        )
    return int(number)


def _named_is_damaged(folder: Path, error: DamagedCheckpoint) -> ConfigError:
    return ConfigError(f"run.resume: the checkpoint {folder} is damaged: {error}")
