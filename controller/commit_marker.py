"""The commit marker of a pair checkpoint: what makes it count, and by which digests its other files are known."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from splitppo.manifest import DamagedCheckpoint, FileEntry, read_file, sealed_json

_VERSION = 1


@dataclass(frozen=True)
class CommitMarker:
    """Written last, when everything that it names is durable.

    Attributes:
        step: of the checkpoint.
        state: the controller's part, controller.json.
        manifests: sha256 of every role's manifest.json.
    """

    step: int
    state: FileEntry
    manifests: Mapping[str, str]

    def serialise(self) -> bytes:
        """The one form in which this marker may be stored."""
        return sealed_json({"version": _VERSION, **asdict(self)})

    @classmethod
    def read(cls, file: Path, step: int) -> Self:
        """The marker of the checkpoint of `step`.

        Raises:
            DamagedCheckpoint: it is missing, or not as it was written.
        """
        content = read_file(file)
        try:
            stored: dict[str, Any] = json.loads(content)
            if stored.pop("version") != _VERSION:
                raise ValueError("another version")
            marker = cls(stored["step"], FileEntry(**stored["state"]), stored["manifests"])
            is_as_written = marker.step == step and marker.serialise() == content
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DamagedCheckpoint(f"{file}: expected a commit marker, it cannot be read") from error
        if not is_as_written:
            raise DamagedCheckpoint(f"{file}: expected the commit marker of step {step} as it was written")
        return marker


def entry_of(content: bytes) -> FileEntry:
    """What a marker says of a file with this content."""
    return FileEntry(len(content), hashlib.sha256(content).hexdigest())
