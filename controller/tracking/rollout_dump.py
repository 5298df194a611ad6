"""Every rollout as JSONL, if asked: `tracking.dump_rollouts`."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from controller.tracking.step_file import json_line
from splitppo.atomic_write import write_atomically


class RolloutDump:
    """Every rollout of a step in `<run.dir>/rollouts/{train,val}/{step}.jsonl`; the folder is made with the first."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def write(self, split: Literal["train", "val"], step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        """Writes the rollouts of a step, one JSON object per response."""
        write_atomically(self._directory / split / f"{step}.jsonl", b"".join(map(json_line, rows)))

    def cut_back(self, restored_step: int) -> None:
        """Removes the files of later steps."""
        for file in self._directory.glob("*/*.jsonl"):
            if file.stem.isdigit() and int(file.stem) > restored_step:
                file.unlink()
