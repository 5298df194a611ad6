"""Measures the resources that a process and its descendants use together, from /proc."""

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
# Positions in /proc/PID/stat, counted after the command: state; user and system time, own and of ended children;
# threads; resident pages.
_STATE = 0
_TIMES = slice(11, 15)
_THREADS = 17
_PAGES = 21


@dataclass(frozen=True)
class Usage:
    """The resources that a process and all its descendants use together.

    Attributes:
        num_threads: the threads of all processes that have not ended.
        memory_bytes: resident memory; memory that processes share counts once for each of them.
        cpu_s: user and system time in seconds, also of processes that have ended and were waited for.
    """

    num_threads: int = 0
    memory_bytes: int = 0
    cpu_s: float = 0.0


def children_of(pid: int) -> list[int]:
    """Returns the pids of a process's children, living and ended; an empty list if the process does not exist."""
    children: list[int] = []
    with suppress(FileNotFoundError, ProcessLookupError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            children += map(int, (thread / "children").read_text().split())
    return children


def usage_of(pid: int) -> Usage:
    """Measures the resources of a process and its descendants; processes that start or end meanwhile may be missing."""
    num_threads = 0
    pages = 0
    ticks = 0
    pids = [pid]
    for descendant in pids:
        try:
            fields = Path(f"/proc/{descendant}/stat").read_bytes().rpartition(b")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        ticks += sum(map(int, fields[_TIMES]))
        if fields[_STATE] not in b"ZX":
            num_threads += int(fields[_THREADS])
            pages += int(fields[_PAGES])
        pids += children_of(descendant)
    return Usage(num_threads, pages * _PAGE_BYTES, ticks / _TICKS_PER_S)
