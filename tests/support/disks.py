"""Mounts small file systems for tests, and makes them read-only: file permissions do not stop root."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def mounted(folder: Path, options: str) -> Iterator[Path]:
    """Mounts a tmpfs, e.g. with the options "size=32m"; skips the test if mounting is not allowed."""
    folder.mkdir(parents=True)
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("needs the right to mount a tmpfs")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def remount(disk: Path, mode: str) -> bool:
    """Makes a mount read-only ("ro"), as a file system does after an error, or writable ("rw").

    Returns:
        False if a process is writing to it now.
    """
    command = ["mount", "-o", f"remount,{mode}", str(disk)]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def fill(disk: Path, *, left: int = 0) -> Path:
    """Fills a file system up to `left` free bytes; returns the file that takes them."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file:
        room = os.statvfs(disk)
        num_bytes = room.f_bavail * room.f_frsize - left
        while num_bytes > 0:
            try:
                num_bytes -= file.write(bytes(min(num_bytes, 1 << 16)))
            except OSError:
                break
    return filler
