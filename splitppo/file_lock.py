"""Locks of open files, by flock; a lock lasts as long as the process has the file open."""

import fcntl
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

from splitppo.plain_file import open_plain

_POLL_INTERVAL_S = 0.1


def try_lock(file: IO[Any], *, shared: bool = False) -> bool:
    """Takes the flock of an open file without waiting; returns False if the lock of another process prevents it."""
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def any_lock(files: Sequence[Path]) -> Iterator[None]:
    """Locks one of several files during the `with` block, and first waits until one is free; no files: no lock.

    The lock also excludes other threads of this process.
    """
    with ExitStack() as stack:
        opened = [stack.enter_context(open_plain(file, "ab")) for file in files]
        while opened and not any(try_lock(file) for file in opened):
            time.sleep(_POLL_INTERVAL_S)
        yield
