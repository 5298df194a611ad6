"""Writes files so that a reader never sees a half-written file, also after a crash."""

import os
from pathlib import Path


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replaces the file `path` by one with `content` (text as UTF-8), durably.

    A reader sees the old file or the whole new one, also after a crash. Missing folders are made. When the function
    returns, content and name are on disk. An OSError names `path`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Makes the names of files in `folder` durable (fsync of the folder)."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
