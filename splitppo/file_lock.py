"""File locks that a process holds as long as the file is open."""

import fcntl
from typing import TextIO


def try_lock(file: TextIO, *, shared: bool = False) -> bool:
    """Takes the lock of a file without waiting; returns False if a process holds a lock that excludes this one."""
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
