"""Writes and reads the reason why a worker group has ended, for a controller that had no open call to be answered."""

import json
from contextlib import suppress
from pathlib import Path

from splitppo.atomic_write import write_atomically

BAD_INPUT_EXIT = 2  # the exit status of a rank that ends because of the user's input


def write_end_reason(run_dir: Path, role: str, instance_id: str, reason: str) -> None:
    """Writes why this instance of a group ends to a file in the run folder, unless the folder cannot be written."""
    with suppress(OSError):
        write_atomically(_file(run_dir, role), json.dumps({"instance_id": instance_id, "reason": reason}, indent=1))


def read_end_reason(run_dir: Path, role: str, instance_id: str) -> str | None:
    """Returns the reason that this instance of a group has written; None without one, also if another instance has."""
    with suppress(OSError, ValueError):
        match json.loads(_file(run_dir, role).read_bytes()):
            case {"instance_id": str(writer), "reason": str(reason)} if writer == instance_id:
                return reason
    return None


def _file(run_dir: Path, role: str) -> Path:
    return run_dir / "services" / f"{role}.failure.json"
