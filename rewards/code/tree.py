"""The resources that a process and all that it has started use together, from /proc."""

import os
from dataclasses import dataclass
from pathlib import Path

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
# Positions in /proc/PID/stat behind the command's name: user and system time, both of ended children, threads, pages.
_STATE, _TIMES, _THREADS, _PAGES = 0, slice(11, 15), 17, 21


@dataclass(frozen=True)
class Usage:
    """The resources that a tree of processes uses.

    Attributes:
        num_threads: of those that have not ended.
        memory_bytes: resident; what processes share counts for each.
        cpu_s: user and system time, also of those that have ended and were waited for.
    """

    num_threads: int = 0
    memory_bytes: int = 0
    cpu_s: float = 0.0


def children_of(pid: int) -> list[int]:
    """The living and ended children of all threads of a process; none where it is gone."""
    found: list[int] = []
    try:
        for thread in Path(f"/proc/{pid}/task").iterdir():
            found += map(int, (thread / "children").read_text().split())
    except (FileNotFoundError, ProcessLookupError):
        pass
    return found


def usage_of(pid: int) -> Usage:
    """Returns the use of a process and all below it; processes that start or end meanwhile may be missed."""
    num_threads, pages, ticks = 0, 0, 0
    pids = [pid]
    for one in pids:
        try:
            fields = Path(f"/proc/{one}/stat").read_bytes().rpartition(b")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        ticks += sum(map(int, fields[_TIMES]))
        if fields[_STATE] not in b"ZX":
            num_threads += int(fields[_THREADS])
            pages += int(fields[_PAGES])
        pids += children_of(one)
    return Usage(num_threads, pages * _PAGE_BYTES, ticks / _TICKS_PER_S)
