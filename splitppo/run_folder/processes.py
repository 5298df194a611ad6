"""The processes of a run. Each group tells its own, and all else that lists processes is made from that.

services/ROLE.json   a group that takes calls: its address and its ranks; rank 0 writes it, and removes it at its end
processes.json       the ranks of all groups and the controller, of the last time that all were there
"""

import json
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from splitppo.atomic_write import write_atomically
from splitppo.plain_file import read_plain

PROCESSES_FILE = "processes.json"


@dataclass(frozen=True)
class Rank:
    """The process of one rank of a group, and the name of its machine."""

    rank: int
    pid: int
    host: str = ""


@dataclass(frozen=True)
class Group:
    """A worker group that takes calls, as it tells of itself.

    Attributes:
        address: host:port of its rank 0.
        instance_id: another one each time that the group is started.
    """

    role: str
    address: str
    instance_id: str
    processes: Sequence[Rank]

    def announce(self, run_dir: Path) -> None:
        """Writes services/ROLE.json."""
        write_atomically(announcement(run_dir, self.role), json.dumps(asdict(self), indent=1))

    @classmethod
    def announced(cls, run_dir: Path, role: str) -> Self | None:
        """Reads services/ROLE.json; None without a file, or if the file says something else."""
        with suppress(OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError):
            told = json.loads(read_plain(announcement(run_dir, role)))
            ranks = [Rank(**rank) for rank in told["processes"]]
            return cls(str(told["role"]), str(told["address"]), str(told["instance_id"]), ranks)
        return None

    def event(self) -> dict[str, Any]:
        """Returns the fields of the event `group_up`; pids by rank, and the machine of rank 0."""
        host = self.processes[0].host if self.processes else ""
        pids = [rank.pid for rank in self.processes]
        return {"role": self.role, "instance_id": self.instance_id, "pids": pids, "host": host}


def announcement(run_dir: Path, role: str) -> Path:
    """Returns the path of services/ROLE.json."""
    return run_dir / "services" / f"{role}.json"


def write_processes(run_dir: Path, groups: Iterable[Group]) -> None:
    """Writes processes.json: the ranks of these groups, and this process, the controller, which nobody calls."""
    rows: list[dict[str, Any]] = []
    for group in groups:
        known = {"address": group.address, "instance_id": group.instance_id}
        rows += [{"role": group.role, **_place(rank), **known} for rank in group.processes]
    controller = Rank(0, os.getpid(), os.uname().nodename)
    rows.append({"role": "controller", **_place(controller), "address": None, "instance_id": None})
    write_atomically(run_dir / PROCESSES_FILE, json.dumps(rows, indent=2))


def _place(rank: Rank) -> dict[str, Any]:
    return {"rank": rank.rank, "pid": rank.pid, "host": rank.host}


def read_processes(run_dir: Path, role: str) -> list[Rank]:
    """Reads the processes of a role ("controller", too) from processes.json; [] without any, or if it is broken."""
    try:
        rows = json.loads(read_plain(run_dir / PROCESSES_FILE))
    except (OSError, ValueError, RecursionError):
        return []
    found = [row for row in rows if isinstance(row, dict) and row.get("role") == role] if isinstance(rows, list) else []
    with suppress(LookupError, ValueError, TypeError):
        return [Rank(int(row["rank"]), int(row["pid"]), str(row["host"])) for row in found]
    return []
