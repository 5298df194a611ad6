"""Writes files so that a reader never sees a half-written file, also after a crash."""

import os
import stat
from pathlib import Path

from splitppo.plain_file import NoPlainFile


def write_atomically(path: Path, content: str | bytes, *, is_private: bool = False) -> None:
    """Replaces the file `path` by one with `content` (text as UTF-8), durably.

    A reader sees the old file or the whole new one, also after a crash. Missing folders are made. When the function
    returns, content and name are on disk. With `is_private`, only its owner can read it. An OSError names `path`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb", opener=_open_private if is_private else None) as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, IsADirectoryError):
            raise NoPlainFile(path, stat.S_IFDIR) from error
        if isinstance(error, OSError):
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise
    sync_folder(path.parent)


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def sync_folder(folder: Path) -> None:
    """Makes the names of files in `folder` durable (fsync of the folder)."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
