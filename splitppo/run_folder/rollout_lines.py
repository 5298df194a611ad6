"""`rollouts/*/N.jsonl`: all responses of a step as JSON lines, for scripts of people, where a key asks for them."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from splitppo.atomic_write import write_atomically
from splitppo.run_folder.append_log import json_line


def write_rollouts(folder: Path, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
    """Writes all responses of a step to the file `{step}.jsonl`, one JSON object each."""
    write_atomically(folder / f"{step}.jsonl", b"".join(map(json_line, rows)))


def cut_back(rollouts: Path, restored_step: int) -> None:
    """Removes the files of steps after the restored step from all folders in `<run.dir>/rollouts`."""
    for file in rollouts.glob("*/*.jsonl"):
        if file.stem.isdigit() and int(file.stem) > restored_step:
            file.unlink()
