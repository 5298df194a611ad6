"""The file that gets what tools and environments print: it stays bounded, however much they print."""

import fcntl
import os
import threading
import time
from contextlib import suppress
from pathlib import Path

from splitppo.plain_file import plain_descriptor

MAX_BYTES = 64 << 20
_KEPT_BYTES = 1 << 20
_POLL_INTERVAL_S = 0.5


def bounded_output(path: Path) -> int:
    """Opens a file for what this process and others print at the same time; returns its descriptor.

    A thread shortens the file to its last MiB when it has become longer than MAX_BYTES. In the half second until it
    looks again, more may be printed.
    """
    fd = plain_descriptor(path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
    threading.Thread(target=_keep_bounded, args=(fd,), name="output", daemon=True).start()
    return fd


def _keep_bounded(fd: int) -> None:
    """Shortens a file of output whenever it has grown too long, for ever."""
    while True:
        with suppress(OSError):  # a full disk: the next time
            shorten(fd)
        time.sleep(_POLL_INTERVAL_S)


def shorten(fd: int, max_bytes: int = MAX_BYTES) -> None:
    """Shortens a file that is longer than `max_bytes` to its last MiB, from the begin of a line, and says so in it.

    What others append to the file meanwhile may be lost.
    """
    if os.fstat(fd).st_size <= max_bytes:
        return
    fcntl.flock(fd, fcntl.LOCK_EX)
    try:
        if (num_bytes := os.fstat(fd).st_size) > max_bytes:  # no other process has shortened it
            _, _, kept = os.pread(fd, _KEPT_BYTES, num_bytes - _KEPT_BYTES).partition(b"\n")
            os.ftruncate(fd, 0)
            os.write(
                fd, b"[%d bytes are left out: this file has at most %d]\n%b" % (num_bytes - len(kept), max_bytes, kept)
            )
    finally:
        fcntl.flock(fd, fcntl.LOCK_UN)
