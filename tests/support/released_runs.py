"""Run folders of the first release, version 0.1.0, without their checkpoints.

Each archive holds a run folder and answers.json, what the viewer of the release answered about it. They were made by
commit 818d8837; paths and names of machines were replaced.
"""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

_ARCHIVES = Path(__file__).with_name("released")
# A plain run, one with conversations, and one that lost its actor group.
RELEASED = ("normal", "talks", "recovered")


def released_run(name: str, folder: Path) -> tuple[Path, dict[str, Any]]:
    """Unpacks a run into `folder`; returns the run folder, and the answers by their addresses."""
    with tarfile.open(_ARCHIVES / f"{name}.tar.gz") as packed:
        packed.extractall(folder, filter="data")
    return folder / name, json.loads((folder / "answers.json").read_text())
