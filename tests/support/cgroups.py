"""Makes cgroups with little memory for tests."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

_DEADLINE_S = 30.0


@contextmanager
def memory_limit(num_bytes: int) -> Iterator[Path]:
    """Makes a cgroup with so many bytes of memory, and yields the file to which the pids of its processes are written.

    Skips the test if no cgroup may be made.
    """
    mounted = Path("/sys/fs/cgroup")
    is_v1 = (mounted / "memory").is_dir()
    folder = mounted / ("memory" if is_v1 else "") / f"splitppo-test-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError:
        pytest.skip("needs the right to make a cgroup")
    try:
        limit = folder / ("memory.limit_in_bytes" if is_v1 else "memory.max")
        if not limit.exists():
            pytest.skip("needs the memory controller")
        limit.write_text(str(num_bytes))
        yield folder / "cgroup.procs"
    finally:
        deadline = time.monotonic() + _DEADLINE_S
        while (folder / "cgroup.procs").read_text() and time.monotonic() < deadline:
            time.sleep(0.01)
        folder.rmdir()
