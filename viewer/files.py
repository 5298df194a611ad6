"""Opens files inside a run folder: by names that this package knows, never through a link, never beyond a size."""

import io
import json
import os
import re
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_STEP_FILE = re.compile(r"(0|[1-9][0-9]{0,8})\.parquet")
MAX_JSON_BYTES = 16 << 20
MAX_LINES_BYTES = 512 << 20
MAX_LINE_BYTES = 4 << 20
MAX_LINES = 1 << 20
MAX_DEPTH = 64
MAX_PARQUET_BYTES = 512 << 20
_MARK_BYTES = 1 << 10


class Unreadable(Exception):
    """Something of a run folder that is missing or broken; the text is a sentence for the page."""


@dataclass(frozen=True)
class RunDir:
    """One run folder; every access opens it anew, so that a folder that was removed is noticed."""

    path: Path

    @contextmanager
    def open(self, *names: str, max_bytes: int = MAX_JSON_BYTES) -> Iterator[BinaryIO]:
        """Opens a file of the folder for reading.

        Raises:
            Unreadable: it is not there, is a link or no plain file, or is larger than `max_bytes`.
        """
        name = "/".join(names)
        descriptor = self._descend(names, name)
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode):
            os.close(descriptor)
            raise Unreadable(f"{name} is no plain file.")
        with os.fdopen(descriptor, "rb") as file:
            if facts.st_size > max_bytes:
                raise Unreadable(f"{name} has {facts.st_size:,} bytes; the viewer reads at most {max_bytes:,}.")
            yield file

    def _descend(self, names: tuple[str, ...], name: str) -> int:
        try:
            folder = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise Unreadable(f"The run folder {self.path} cannot be read: {error.strerror}.") from error
        try:
            for part in names[:-1]:
                inner = os.open(part, _FLAGS | os.O_DIRECTORY, dir_fd=folder)
                os.close(folder)
                folder = inner
            return os.open(names[-1], _FLAGS, dir_fd=folder)
        except OSError as error:
            raise Unreadable(f"{name} cannot be read: {error.strerror}.") from error
        finally:
            os.close(folder)

    def json(self, *names: str) -> dict[str, Any]:
        """Reads a file that holds one JSON object, else raises Unreadable."""
        with self.open(*names) as file:
            return json_object(file.read(), "/".join(names))

    def stamp(self, *names: str) -> tuple[int, int, int] | None:
        """Returns (inode, bytes, time of the last change) of a file, by which a change is noticed; None without it."""
        with suppress(OSError):
            facts = self.path.joinpath(*names).lstat()
            return facts.st_ino, facts.st_size, facts.st_mtime_ns
        return None

    def steps(self, kind: str) -> list[int]:
        """Returns the steps that have a file in rollouts/train or rollouts/val, in order."""
        try:
            names = [file.name for file in (self.path / "rollouts" / kind).iterdir()]
        except OSError:
            return []
        return sorted(int(found[1]) for found in map(_STEP_FILE.fullmatch, names) if found)


class Tail:
    """A file of one JSON object per line that grows: each `read` gives what is new.

    Attributes:
        lines_broken: how many lines were no JSON object, or came after MAX_LINES others, and were left out.
    """

    def __init__(self, folder: RunDir, name: str) -> None:
        self.lines_broken = self._num_lines = 0
        self._folder = folder
        self._name = name
        self._inode = self._offset = 0
        self._mark = b""  # the bytes before the offset; a file that is replaced twice may have its first inode again

    def read(self) -> tuple[bool, Iterator[dict[str, Any]]]:
        """Returns (True if the file is another one than before, the objects of its new whole lines).

        The objects, which take many times the memory of their lines, are made one by one while they are iterated over.
        """
        inode = 0
        is_same = self._inode == 0
        content = b""  # if there is no file
        with suppress(Unreadable), self._folder.open(self._name, max_bytes=MAX_LINES_BYTES) as file:
            facts = os.fstat(file.fileno())
            inode = facts.st_ino
            file.seek(max(0, self._offset - len(self._mark)))
            is_same = inode == self._inode and file.read(len(self._mark)) == self._mark
            content = file.read(max(0, facts.st_size - file.seek(self._offset if is_same else 0)))
        if not is_same:
            self._inode = inode
            self._offset = 0
            self._mark = b""
            self.lines_broken = self._num_lines = 0
        whole = content.rfind(b"\n") + 1
        self._offset += whole
        self._mark = (self._mark + content[:whole])[-_MARK_BYTES:]
        return not is_same, self._objects(content[:whole])

    def _objects(self, content: bytes) -> Iterator[dict[str, Any]]:
        for line in filter(bytes.strip, io.BytesIO(content)):
            self._num_lines += 1
            try:
                if self._num_lines > MAX_LINES:
                    raise Unreadable(f"{self._name} has more than {MAX_LINES:,} lines.")
                yield json_object(line, self._name)
            except Unreadable:
                self.lines_broken += 1


def json_object(content: bytes, name: str) -> dict[str, Any]:
    """Reads one JSON object, else raises Unreadable."""
    if len(content) > MAX_JSON_BYTES or (name.endswith("l") and len(content) > MAX_LINE_BYTES):
        raise Unreadable(f"{name} has a value of {len(content):,} bytes, which is too much.")
    try:
        value = json.loads(content.decode(errors="replace"))
    except (ValueError, RecursionError) as error:
        raise Unreadable(f"{name} is not valid JSON: {error}.") from error
    if not isinstance(value, dict):
        raise Unreadable(f"{name} holds {type(value).__name__}, not an object.")
    if content.count(b"{") + content.count(b"[") > MAX_DEPTH and _is_deeper(value, MAX_DEPTH):
        raise Unreadable(f"{name} has a value that is nested more than {MAX_DEPTH} times.")
    return value


def _is_deeper(value: Any, depth: int) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return depth == 0 or any(_is_deeper(item, depth - 1) for item in inner if isinstance(item, dict | list))


def finite(value: Any) -> float | None:
    """Returns what a JSON file gives as a number, None for anything else (true, too), for NaN and for infinity."""
    return float(value) if type(value) in (int, float) and abs(value) <= sys.float_info.max else None
