"""Writes, reads and verifies the manifest of one role's part of a checkpoint: sizes and digests of its files.

A service writes the manifest when the files are durable; the controller's commit marker contains the manifest's digest.
Controller and service read the manifest.
"""

import errno
import hashlib
import json
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

from pydantic import TypeAdapter, ValidationError

from splitppo.atomic_write import sync_folder, write_atomically

MANIFEST = "manifest.json"
_VERSION = 1
# Network file systems keep a removed file under such a name while somebody reads it.
_REMOVED_BUT_OPEN = ".nfs"
_MAX_THREADS = 8
R = TypeVar("R")
_MAX_SEALED_BYTES = 256 << 20  # a manifest has about 200 bytes for each weight or file


class DamagedCheckpoint(ValueError):
    """Raised if files of a checkpoint are missing, or are not what was written.

    `str()` names the file, what was expected and what was found.
    """


@dataclass(frozen=True)
class FileEntry:
    """The size in bytes and the sha256 (hex) of one file of a checkpoint."""

    size: int
    sha256: str

    @classmethod
    def of(cls, content: bytes) -> Self:
        return cls(len(content), hashlib.sha256(content).hexdigest())


@dataclass(frozen=True)
class SealedFile:
    """The base class of small JSON files with a digest of their own content, so that a reader sees any changed bit."""

    KIND: ClassVar[str]

    def serialise(self) -> bytes:
        """Returns the file's bytes: JSON with a version, and a sha256 of all the rest."""
        # Defaults are left out, since earlier versions did not have these fields.
        defaults = {field.name: field.default for field in fields(self)}
        values = {name: value for name, value in asdict(self).items() if value != defaults[name]}
        content = {"version": _VERSION, **values}
        return _canonical_json({**content, "sha256": hashlib.sha256(_canonical_json(content)).hexdigest()})

    @classmethod
    def read(cls, file: Path) -> Self:
        """Reads a JSON file that `serialise` has written, and checks the digest of its content.

        Raises:
            DamagedCheckpoint: the file is missing, or not as it was written.
            OSError: the storage cannot be reached, or may not be read.
        """
        with _reading(file):
            if not stat.S_ISREG((found := file.stat()).st_mode) or found.st_size > _MAX_SEALED_BYTES:
                raise DamagedCheckpoint(f"{file}: expected a {cls.KIND}, it is no file, or larger than 256 MiB")
            content = file.read_bytes()
        try:
            sealed = TypeAdapter(cls).validate_json(content)
        except ValidationError as error:
            raise DamagedCheckpoint(f"{file}: expected a {cls.KIND}, it cannot be read") from error
        if sealed.serialise() != content:
            raise DamagedCheckpoint(f"{file}: expected the {cls.KIND} as it was written, it was changed")
        return sealed


def _canonical_json(content: Mapping[str, Any]) -> bytes:
    return f"{json.dumps(content, indent=1, sort_keys=True)}\n".encode()


@dataclass(frozen=True)
class Manifest(SealedFile):
    """The files that one role has written for a checkpoint, with sizes and digests, and what they contain."""

    KIND = "manifest"
    role: str
    step: int
    model: str  # the architecture, in the words of the role
    files: Mapping[str, FileEntry]  # all except the manifest, by path in the part's folder ("/" between folders)
    weights_sha256: str  # of the model, as ComputeWeightsDigest returns it
    ledger_sha256: str  # of the bytes of the ledger, which is one of the files' contents


def write_manifest(folder: Path, manifest: Manifest) -> str:
    """Writes a manifest durably into the folder that the manifest describes; returns the manifest's sha256."""
    content = manifest.serialise()
    write_atomically(folder / MANIFEST, content)
    return hashlib.sha256(content).hexdigest()


def read_manifest(folder: Path, sha256: str | None = None) -> Manifest:
    """Reads and checks the manifest of one role's part of a checkpoint.

    Raises:
        DamagedCheckpoint: the manifest is missing, not as it was written, or has another digest than `sha256`.
    """
    manifest = Manifest.read(folder / MANIFEST)
    if sha256 is not None:
        verify_digest(folder / MANIFEST, sha256, hashlib.sha256(manifest.serialise()).hexdigest())
    return manifest


def describe_files(folder: Path) -> dict[str, FileEntry]:
    """Makes every file and folder below `folder` durable (fsync); returns size and digest of each file by path.

    Links are not followed.
    """
    paths = (path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
    files = {path.relative_to(folder).as_posix(): path for path in paths if not path.name.startswith(_REMOVED_BUT_OPEN)}
    files.pop(MANIFEST, None)
    entries = {name: measure(file, durable=True) for name, file in sorted(files.items())}
    for inner in {file.parent for file in files.values()} | {folder, folder.parent}:
        sync_folder(inner)
    return entries


def verify_files(folder: Path, manifest: Manifest) -> None:
    """Checks the files of a checkpoint part against the manifest: first sizes, then contents, on several threads.

    Files that the manifest does not name are ignored.

    Raises:
        DamagedCheckpoint: a file is missing, of another size or content, or cannot be read.
        OSError: the storage cannot be reached, or may not be read.
    """
    files = {folder / name: expected for name, expected in manifest.files.items()}
    for file, expected in files.items():
        verify_size(file, expected.size)
    map_in_threads(verify_file, files, files.values())


def map_in_threads(function: Callable[..., R], *arguments: Iterable[Any], most: int = _MAX_THREADS) -> list[R]:
    """Returns the results of a function that reads and hashes, in the order of its arguments, on several threads."""
    num_threads = max(1, min(most, _MAX_THREADS, len(os.sched_getaffinity(0))))
    with ThreadPoolExecutor(num_threads, thread_name_prefix="verify") as threads:
        return list(threads.map(function, *arguments))


def verify_file(file: Path, expected: FileEntry) -> None:
    """Checks the size and the sha256 of one file against its manifest entry; raises the errors of `verify_files`."""
    verify_size(file, expected.size)
    verify_digest(file, expected.sha256, measure(file).sha256)


def verify_size(file: Path, expected: int) -> None:
    """Raises DamagedCheckpoint unless a file has the expected number of bytes."""
    try:
        size = file.stat().st_size
    except (FileNotFoundError, NotADirectoryError) as error:
        raise DamagedCheckpoint(f"{file}: expected {expected} bytes, the file is missing") from error
    if size != expected:
        raise DamagedCheckpoint(f"{file}: expected {expected} bytes, found {size}")


def verify_digest(file: Path, expected: str, actual: str) -> None:
    """Raises DamagedCheckpoint unless the sha256 of a file is the expected one."""
    if actual != expected:
        raise DamagedCheckpoint(f"{file}: expected sha256 {expected[:16]}..., found {actual[:16]}...")


def measure(file: Path, *, durable: bool = False) -> FileEntry:
    """Reads a file's size and digest; `durable` writes it to the storage before (fsync)."""
    with _reading(file, was_promised=not durable), file.open("rb") as stream:
        if durable:
            os.fsync(stream.fileno())
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
        return FileEntry(stream.tell(), digest)


@contextmanager
def _reading(file: Path, *, was_promised: bool = True) -> Iterator[None]:
    """Converts an OSError of reading a checkpoint file to DamagedCheckpoint if it means that the file is damaged.

    That is so if a file of the manifest is missing, or if the storage reports an input/output error.
    """
    try:
        yield
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
        if not was_promised:
            raise
        raise DamagedCheckpoint(f"{file}: the file is missing") from error
    except OSError as error:
        if error.errno == errno.EIO:
            raise DamagedCheckpoint(f"{file}: expected a readable file, found: {error.strerror}") from error
        raise
