"""Measures from outside what all processes of a sandbox use together, says which limit they exceed, and ends them."""

import os
import signal
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from rewards.code.limits import MAX_FILES, Limit
from rewards.code.tree import children_of, usage_of
from splitppo.machine.children.ending import end
from splitppo.machine.children.tree import kill_tree

POLL_INTERVAL_S = 0.05
_EXIT_LIMIT_S = 10.0


@dataclass(frozen=True)
class Bounds:
    """The resources that all processes of one sandbox may use together; the sandbox's files count as memory.

    Attributes:
        num_threads: threads of all processes, without those that are the sandbox's own.
        files: the folder in the sandbox whose file system, in memory, has `file_bytes` for files; None without one.
    """

    cpu_s: float
    wall_s: float
    memory_bytes: int
    num_threads: int
    file_bytes: int
    files: str | None


@dataclass(frozen=True)
class Watch:
    """Compares the use of a sandbox, which began when this object was made, with its bounds.

    Attributes:
        pid: the process outside that has started the sandbox: bubblewrap, or without a sandbox the program's parent.
        num_own_threads: threads of the sandbox itself, which do not count.
    """

    pid: int
    bounds: Bounds
    num_own_threads: int
    started_s: float = field(default_factory=time.monotonic)

    def exceeded(self) -> Limit | None:
        """Returns a limit that all processes of the sandbox together exceed now; None if they exceed none."""
        bounds = self.bounds
        usage = usage_of(self.pid)
        if usage.cpu_s > bounds.cpu_s or time.monotonic() - self.started_s > bounds.wall_s:
            return Limit.TIME
        if usage.num_threads - self.num_own_threads > bounds.num_threads:
            return Limit.PROCESSES
        file_bytes = 0
        if files := file_system(self.pid, bounds):
            file_bytes = (files.f_blocks - files.f_bfree) * files.f_frsize  # they are memory
            if files.f_files - files.f_ffree > MAX_FILES or file_bytes >= bounds.file_bytes:
                return Limit.FILES
        return Limit.MEMORY if usage.memory_bytes + file_bytes > bounds.memory_bytes else None


def file_system(pid: int, bounds: Bounds) -> os.statvfs_result | None:
    """Returns the use of the sandbox's file system; None before it is mounted, or if it cannot be seen from here."""
    if bounds.files is None:
        return None
    for first_process in children_of(pid):
        with suppress(OSError):
            files = os.statvfs(Path(f"/proc/{first_process}/root", bounds.files.lstrip("/")))
            if files.f_blocks * files.f_frsize == bounds.file_bytes:
                return files
    return None


def end_sandbox(bubblewrap: subprocess.Popen[bytes]) -> None:
    """Ends all processes of a sandbox, and returns when they have ended."""
    children = children_of(bubblewrap.pid)
    if children:
        # With the first process of its namespace all others end, and then bubblewrap itself.
        with suppress(ProcessLookupError):
            os.kill(children[0], signal.SIGKILL)
    end(bubblewrap, _EXIT_LIMIT_S if children else 0.0, kill=kill_tree)
