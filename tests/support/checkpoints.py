"""Checkpoints for tests: small parts with manifests, and what bad luck does to files."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from splitppo.manifest import Manifest, describe_files, write_manifest


def write_part(folder: Path, role: str, step: int) -> str:
    """What a service leaves when its part is durable; returns the sha256 of the manifest."""
    folder.mkdir(parents=True)
    (folder / "shard").write_text(f"{role} {step}")
    weights = hashlib.sha256(f"{role} {step}".encode()).hexdigest()
    ledger = hashlib.sha256(b"ledger").hexdigest()
    return write_manifest(folder, Manifest(role, step, "a model", describe_files(folder), weights, ledger))


def flip(file: Path) -> None:
    """Turns one bit, in the middle."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    _replace(file, bytes(content))


def cut(file: Path) -> None:
    """Loses the last byte."""
    _replace(file, file.read_bytes()[:-1])


def empty(file: Path) -> None:
    """Loses all content, as a crash of a file system does."""
    _replace(file, b"")


def remove(file: Path) -> None:
    """Loses the file."""
    file.unlink()


def _replace(file: Path, content: bytes) -> None:
    """Like a write in place, but for files that share their content with others (hard links)."""
    other = file.with_name(f"{file.name}.damaged")
    other.write_bytes(content)
    other.replace(file)


DAMAGES: tuple[Callable[[Path], None], ...] = (flip, cut, empty, remove)
