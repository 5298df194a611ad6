"""The position of a tracker, kept in the run folder."""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

from splitppo.atomic_write import write_atomically


@dataclass(frozen=True)
class Cursor:
    """The position of one tracker; immutable, each move is on disk when it returns.

    Attributes:
        path: of its file.
        step: the last step that was sent, -1 if none.
        inode: of the metrics.jsonl that it was read from.
        report: sha256 of the last report.png that was sent.
    """

    path: Path
    step: int = -1
    inode: int = 0
    report: str = ""

    @classmethod
    def load(cls, path: Path) -> Self:
        """Returns the position that the file holds; the start if there is no file, or none that can be read."""
        try:
            return cls(path, **json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return cls(path)

    def moved(self, **changes: Any) -> Self:
        """Stores the cursor with `changes`, and returns it."""
        moved = replace(self, **changes)
        fields = asdict(moved)
        del fields["path"]
        write_atomically(self.path, json.dumps(fields) + "\n")
        return moved
