"""Reads the main memory that this process may use, and how many processes the kernel killed for lack of memory."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from splitppo.machine.cgroups import cgroup_folders, text_of

# Files of cgroup v2 and v1: the limit, the memory in use, and the part of it that is a cache and can be dropped.
_LIMITS = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


@dataclass(frozen=True, order=True)
class HostMemory:
    """The free and total main memory in bytes: of the machine, or of the cgroup that leaves less."""

    free: int
    total: int


def host_memory(root: Path = Path("/")) -> HostMemory:
    """Reads the main memory that this process can still get, and its total, in bytes.

    `root` is the folder that contains /proc and /sys.
    """
    machine = psutil.virtual_memory()
    return min([HostMemory(machine.available, machine.total), *_memories_of_cgroups(root)])


def num_oom_kills(root: Path = Path("/")) -> int:
    """Returns how many processes the kernel has killed for lack of memory, in this cgroup or on the machine."""
    files = [
        folder / name for folder in cgroup_folders("memory", root) for name in ("memory.events", "memory.oom_control")
    ]
    counts = (_number("oom_kill", text_of(file)) for file in (*files, root / "proc/vmstat"))
    return next((count for count in counts if count is not None), 0)


def _memories_of_cgroups(root: Path) -> Iterator[HostMemory]:
    """Yields what each memory cgroup of this process leaves it: its limit, and how much of it is free or mere cache."""
    for folder in cgroup_folders("memory", root):
        for limit_file, used_file, cache in _LIMITS:
            limit = text_of(folder / limit_file).strip()
            used = text_of(folder / used_file).strip()
            if limit.isdigit() and used.isdigit():
                cached = _number(cache, text_of(folder / "memory.stat")) or 0
                yield HostMemory(max(0, int(limit) - int(used) + cached), int(limit))


def _number(name: str, text: str) -> int | None:
    match = re.search(rf"^{name} +(\d+)", text, re.MULTILINE)
    return int(match[1]) if match else None
