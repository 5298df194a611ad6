"""The manifest of one role's part of a checkpoint: which files it consists of, to the last bit, and what they hold.

A service writes it when its files are durable; the controller's commit marker names its digest. Both sides read it.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

MANIFEST = "manifest.json"
_VERSION = 1
# Network file systems keep a removed file that somebody reads under such a name for a while.
_REMOVED_BUT_OPEN = ".nfs"
_MAX_THREADS = 8


class DamagedCheckpoint(ValueError):
    """Files of a checkpoint are not what was written; `str()` names the file, what was expected and what was found."""


@dataclass(frozen=True)
class FileEntry:
    """Size in bytes and sha256 (hex) of a file."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What one role has written.

    Attributes:
        role, step: whose part of which checkpoint.
        model: the architecture, as the role describes it.
        files: every file but the manifest itself, by its path below the part's folder ("/" between folders).
        weights_sha256: of the model, as ComputeWeightsDigest answers it.
        ledger_sha256: of the ledger's bytes, which travel inside the files.
    """

    role: str
    step: int
    model: str
    files: Mapping[str, FileEntry]
    weights_sha256: str
    ledger_sha256: str

    def serialise(self) -> bytes:
        """The one form in which this manifest may be stored."""
        return sealed_json({"version": _VERSION, **asdict(self)})

    @classmethod
    def parse(cls, content: bytes, file: Path) -> Self:
        """Reads what `serialise` wrote; `file` is for the message.

        Raises:
            DamagedCheckpoint: anything else.
        """
        try:
            stored: dict[str, Any] = json.loads(content)
            files = {name: FileEntry(**entry) for name, entry in stored.pop("files").items()}
            if stored.pop("version") != _VERSION:
                raise ValueError("another version")
            del stored["sha256"]
            manifest = cls(files=files, **stored)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DamagedCheckpoint(f"{file}: expected a manifest, it cannot be read") from error
        if manifest.serialise() != content:
            raise DamagedCheckpoint(f"{file}: expected the manifest as it was written, it was changed")
        return manifest


def sealed_json(content: Mapping[str, Any]) -> bytes:
    """JSON in one form only, with its own digest: a reader can tell whether a single bit was changed."""
    digest = hashlib.sha256(_canonical_json(content)).hexdigest()
    return _canonical_json({**content, "sha256": digest})


def _canonical_json(content: Mapping[str, Any]) -> bytes:
    return f"{json.dumps(content, indent=1, sort_keys=True)}\n".encode()


def write_manifest(folder: Path, manifest: Manifest) -> str:
    """Stores the manifest durably in the folder that it describes; returns its sha256."""
    content = manifest.serialise()
    with (folder / MANIFEST).open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    _sync(folder)
    return hashlib.sha256(content).hexdigest()


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a part.

    Raises:
        DamagedCheckpoint: it is missing, or not as it was written.
    """
    file = folder / MANIFEST
    return Manifest.parse(read_file(file), file)


def read_file(file: Path) -> bytes:
    """The content of a small file of a checkpoint.

    Raises:
        DamagedCheckpoint: it is missing, or its storage is damaged.
        OSError: storage that cannot be reached, or that may not be read.
    """
    try:
        return file.read_bytes()
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
        raise DamagedCheckpoint(f"{file}: the file is missing") from error
    except OSError as error:
        raise _damage(file, error) from error


def describe_files(folder: Path) -> dict[str, FileEntry]:
    """Makes every file and folder below `folder` durable, and measures the files. Reads all of them.

    Raises:
        OSError: one cannot be read or made durable.
    """
    files = _files_of(folder)
    entries = {name: _measure(file, durable=True) for name, file in files.items()}
    for inner in {file.parent for file in files.values()} | {folder, folder.parent}:
        _sync(inner)
    return entries


def verify_files(folder: Path, manifest: Manifest) -> None:
    """Compares every file with the manifest: names and sizes of all first, then contents, on several threads.

    What the manifest does not name is nobody's: it is never read, and does no harm.

    Raises:
        DamagedCheckpoint: a file is missing, of another size or content, or cannot be read.
        OSError: storage that cannot be reached, or that may not be read.
    """
    present = _files_of(folder)
    for name, expected in manifest.files.items():
        if name not in present or not present[name].exists():  # a link may lead nowhere
            raise DamagedCheckpoint(f"{folder / name}: expected {expected.size} bytes, the file is missing")
        if (found := present[name].stat().st_size) != expected.size:
            raise DamagedCheckpoint(f"{folder / name}: expected {expected.size} bytes, found {found}")
    files = {name: present[name] for name in manifest.files}
    num_threads = max(1, min(_MAX_THREADS, len(os.sched_getaffinity(0)), len(files)))
    with ThreadPoolExecutor(num_threads, thread_name_prefix="verify") as threads:
        for name, found_entry in zip(files, threads.map(_measure, files.values()), strict=True):
            verify_digest(files[name], manifest.files[name].sha256, found_entry.sha256)


def verify_digest(file: Path, expected: str, found: str) -> None:
    """Raises DamagedCheckpoint unless the digests are the same."""
    if found != expected:
        raise DamagedCheckpoint(f"{file}: expected sha256 {expected[:16]}..., found {found[:16]}...")


def _files_of(folder: Path) -> dict[str, Path]:
    """Every file that is not the manifest, by its relative name; links count as files, and are not followed down."""
    found = (path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
    names = {path.relative_to(folder).as_posix(): path for path in found}
    return {
        name: path
        for name, path in sorted(names.items())
        if name != MANIFEST and not path.name.startswith(_REMOVED_BUT_OPEN)
    }


def _measure(file: Path, *, durable: bool = False) -> FileEntry:
    try:
        with file.open("rb") as stream:
            if durable:
                os.fsync(stream.fileno())
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
            return FileEntry(stream.tell(), digest)
    except OSError as error:
        raise _damage(file, error) from error


def _damage(file: Path, error: OSError) -> Exception:
    """What a file that cannot be read means: damage where the storage says so, else the error itself."""
    if error.errno != errno.EIO:
        return error
    return DamagedCheckpoint(f"{file}: expected a readable file, found: {error.strerror}")


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
