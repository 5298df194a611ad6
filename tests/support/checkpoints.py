"""Checkpoints for tests: small parts with manifests, and functions that damage their files."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from splitppo.manifest import Manifest, describe_files, write_manifest


def write_part(folder: Path, role: str, step: int) -> str:
    """Writes a part of a checkpoint as a service does, and returns the sha256 of its manifest."""
    folder.mkdir(parents=True)
    (folder / "shard").write_text(f"{role} {step}")
    weights = hashlib.sha256(f"{role} {step}".encode()).hexdigest()
    ledger = hashlib.sha256(b"ledger").hexdigest()
    return write_manifest(folder, Manifest(role, step, "a model", describe_files(folder), weights, ledger))


def flip(file: Path) -> None:
    """Flips a bit in the middle of a file."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    _replace(file, bytes(content))


def cut(file: Path) -> None:
    """Removes the last byte of a file."""
    _replace(file, file.read_bytes()[:-1])


def empty(file: Path) -> None:
    """Removes all content of a file, as a crash of a file system does."""
    _replace(file, b"")


def remove(file: Path) -> None:
    """Removes a file."""
    file.unlink()


def _replace(file: Path, content: bytes) -> None:
    """Writes a file anew, so that hard links to it keep their content."""
    other = file.with_name(f"{file.name}.damaged")
    other.write_bytes(content)
    other.replace(file)


DAMAGES: tuple[Callable[[Path], None], ...] = (flip, cut, empty, remove)
