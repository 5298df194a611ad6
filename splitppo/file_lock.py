"""Locks of open files, by flock; a lock lasts as long as the process has the file open."""

import fcntl
from typing import TextIO


def try_lock(file: TextIO, *, shared: bool = False) -> bool:
    """Takes the flock of an open file without waiting; returns False if the lock of another process prevents it."""
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
