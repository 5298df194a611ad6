"""Writes and reads why a worker group has ended, for a controller that had no open call to be answered.

The rank that sees the failure writes the reason; torchrun, which sees how its ranks end, writes who ended first.
"""

import json
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from splitppo.atomic_write import write_atomically
from splitppo.plain_file import read_plain

BAD_INPUT_EXIT = 2  # the exit status of a rank that ends because of the user's input


def write_end_reason(run_dir: Path, role: str, instance_id: str, reason: str) -> None:
    """Writes why this instance of a group ends to a file in the run folder, unless the folder cannot be written."""
    with suppress(OSError):
        write_atomically(_file(run_dir, role), json.dumps({"instance_id": instance_id, "reason": reason}, indent=1))


def read_end_reason(run_dir: Path, role: str, instance_id: str) -> str | None:
    """Returns the reason that this instance of a group has written; None without one, also if another instance has."""
    with suppress(OSError, ValueError):
        match json.loads(read_plain(_file(run_dir, role))):
            case {"instance_id": str(writer), "reason": str(reason)} if writer == instance_id:
                return reason
    return None


@dataclass(frozen=True)
class FirstEnd:
    """The rank of a group that ended first, and how.

    Attributes:
        how: e.g. "was ended by SIGKILL"; with `is_oom_kill` also the memory that it had.
        exit_code: negative for a signal.
        refusal: the sentence by which it has refused its input; empty without one.
        is_oom_kill: True if the kernel has killed it because memory had run out.
    """

    rank: int
    how: str
    exit_code: int
    refusal: str = ""
    is_oom_kill: bool = False

    def __str__(self) -> str:
        return f"rank {self.rank} {self.how}"


def first_end_file(run_dir: Path, role: str) -> Path:
    """Returns the path of services/ROLE.end.json."""
    return run_dir / "services" / f"{role}.end.json"


def write_first_end(file: Path, end: FirstEnd) -> None:
    """Writes to a file how the rank that ended first has ended, unless the file cannot be written."""
    with suppress(OSError):
        write_atomically(file, json.dumps(asdict(end), indent=1))


def read_first_end(file: Path) -> FirstEnd | None:
    """Reads how the rank that ended first has ended; None if torchrun has not written it."""
    with suppress(OSError, ValueError, TypeError):
        return FirstEnd(**json.loads(read_plain(file)))
    return None


def _file(run_dir: Path, role: str) -> Path:
    return run_dir / "services" / f"{role}.failure.json"
