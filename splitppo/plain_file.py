"""Opens files without ever waiting: a pipe, a device or a folder in the place of a file is an error that says so.

Readers and writers of a run folder open its files here, because anybody may have put something else there, and a pipe
is waited for by whoever opens it.
"""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class NoPlainFile(OSError, ValueError):
    """Something else is in the place of a file; the message is a sentence that names the path and what is there."""

    def __init__(self, path: str | Path, mode: int) -> None:
        kind = _KINDS.get(stat.S_IFMT(mode), "something else")
        super().__init__(errno.EINVAL, f"expected a file, got {kind}", str(path))

    def __str__(self) -> str:
        return f"{self.filename}: {self.strerror}"


def open_plain(path: Path, mode: str = "rb") -> BinaryIO:
    """Opens a file in a binary mode of `open`; never waits.

    Raises:
        NoPlainFile: a folder, a pipe, a socket or a device is there, or a link to one.
        OSError: as `open` does; it names the path.
    """
    return cast(BinaryIO, open(path, mode, opener=plain_descriptor))


def read_plain(path: Path) -> bytes:
    """Reads a file whole; raises the errors of `open_plain`."""
    with open_plain(path) as file:
        return file.read()


def check_plain(path: Path) -> None:
    """Raises NoPlainFile if something else than a file is there; nothing may be there."""
    if path.exists() and not path.is_file():
        raise NoPlainFile(path, path.stat().st_mode)


def plain_descriptor(path: str | Path, flags: int) -> int:
    """Opens a file as `os.open`, and returns its descriptor; an `opener` of `open`. Raises as `open_plain` does."""
    try:
        descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno in (errno.ENXIO, errno.EISDIR):  # a pipe without a reader, a socket, a folder to write to
            raise NoPlainFile(path, Path(path).stat().st_mode) from error
        raise
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise NoPlainFile(path, mode)
    return descriptor


@contextmanager
def errors_named(path: Path) -> Iterator[None]:
    """Makes each OSError in the `with` block name a file; one of a write that fails, as on a full disk, names none."""
    try:
        yield
    except NoPlainFile:
        raise
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
