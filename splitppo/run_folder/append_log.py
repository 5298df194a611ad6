"""A log is a file of JSON objects, one per line, which one process appends to and others read meanwhile.

A process that dies while it appends leaves a last line without its end. This line is torn: readers leave it out, and
what is appended next begins a line of its own. A log that loses lines becomes another file (another inode), by which
those who follow it notice the change.
"""

import io
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from splitppo.atomic_write import sync_folder, write_atomically
from splitppo.jsonl import MAX_LINE_BYTES, json_object
from splitppo.plain_file import errors_named, open_plain, read_plain

_MARK_BYTES = 1 << 10

# Makes an object of the bytes of a line and of its place ("FILE, line 3"); ValueError for what is none. A follower
# counts a line of which it makes None.
Parse = Callable[[bytes, str], dict[str, Any] | None]


@dataclass(frozen=True)
class Line:
    """A whole line of a log: its number, from 1, its bytes, and where it begins and ends in the file."""

    number: int
    content: bytes
    start: int
    end: int


def object_of(line: bytes, place: str) -> dict[str, Any]:
    """Makes an object of a line; ValueError, which begins with `place`, if it is none, or longer than is read."""
    if len(line) > MAX_LINE_BYTES:
        raise ValueError(f"{place}: it has more than {MAX_LINE_BYTES >> 20} MiB")
    return json_object(line, place)


class AppendLog:
    """Appends to a log, and reads all of it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, line: bytes, *, is_durable: bool = False) -> int:
        """Appends a line, as `json_line` makes it; returns where it begins. If it is durable, it is on disk then.

        Raises:
            OSError: for instance on a full disk; it names the file, which is as it was before.
        """
        size = self.path.stat().st_size if self.path.exists() else 0
        try:
            with errors_named(self.path), open_plain(self.path, "a+b") as file:
                file.seek(max(0, size - 1))
                end_of_torn = b"" if file.read(1) in (b"", b"\n") else b"\n"
                file.write(end_of_torn + line)
                file.flush()
                if is_durable:
                    os.fsync(file.fileno())
        except OSError:
            with suppress(OSError):
                os.truncate(self.path, size)
            raise
        return size + len(end_of_torn)

    def sync(self) -> None:
        """Waits until all lines are on disk, also those of another process."""
        with open_plain(self.path) as file:
            os.fsync(file.fileno())
        sync_folder(self.path.parent)

    def replace(self, lines: Iterable[bytes]) -> None:
        """Replaces the log by these lines, if it does not hold just them: then it is another file for its readers."""
        content = b"".join(lines)
        before = read_plain(self.path) if self.path.exists() else b""
        if content != before:
            write_atomically(self.path, content)

    def cut_after(self, end: int) -> int:
        """Removes all bytes after `end`; returns how many there were."""
        size = self.path.stat().st_size
        if size > end:
            os.truncate(self.path, end)
        return size - end

    def lines(self) -> Iterator[Line]:
        """Yields all whole lines, blank ones, too; none without a file."""
        if self.path.exists():
            with open_plain(self.path) as file:
                yield from _whole_lines(file)

    def line_at(self, start: int) -> bytes:
        """Reads the line that begins at this place."""
        with open_plain(self.path) as file:
            file.seek(start)
            return file.readline()

    def objects(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yields (line number, object) of each line that is not blank; of a last line that is broken, nothing.

        Raises:
            ValueError: another line is no JSON object, or too long, or this is a folder, a pipe or a device. The
                message names file and line.
        """
        broken: ValueError | None = None
        for line in self.lines():
            if not line.content.strip():
                continue
            if broken is not None:
                raise broken
            try:
                found = object_of(line.content, f"{self.path}, line {line.number}")
            except ValueError as error:
                broken = error
                continue
            yield line.number, found


class Follower:
    """Reads a log while another process writes it: first all of it, then what is new.

    Attributes:
        inode: the inode of the file that was read last; 0 without a file.
        num_broken: how many lines were no objects for `parse`, or came after `max_lines` others, and were left out.
    """

    def __init__(
        self,
        open_file: Callable[[], BinaryIO | None],
        name: str,
        *,
        parse: Parse = object_of,
        max_lines: int | None = None,
    ) -> None:
        """Makes a reader of the file that `open_file` opens, None if there is none; `name` is the file's in errors."""
        self._open_file = open_file
        self._name = name
        self._parse = parse
        self._max_lines = max_lines
        self.restart()

    @classmethod
    def of(cls, path: Path, *, parse: Parse = object_of) -> "Follower":
        """Follows the log at a path; a folder, a pipe or a device is a ValueError of `read`."""

        def open_file() -> BinaryIO | None:
            with suppress(FileNotFoundError):
                return open_plain(path)
            return None

        return cls(open_file, str(path), parse=parse)

    def restart(self) -> None:
        """Lets the next `read` begin with the first line."""
        self.inode = 0
        self.num_broken = 0
        self._num_objects = 0
        self._number = 0
        self._offset = 0
        self._mark = b""  # the bytes before the offset; a file that is replaced twice may have its first inode again

    def read(self) -> tuple[bool, Iterator[dict[str, Any]]]:
        """Returns (True if the file is another one than before, the objects of its new whole lines).

        The objects, which take many times the memory of their lines, are made one by one while they are iterated over.
        A line counts as read once the next one is asked for: who stops at a line gets it again.
        """
        inode = 0
        is_same = self.inode == 0  # without a file now: there was none before
        content = b""
        file = self._open_file()
        if file is not None:
            with file:
                facts = os.fstat(file.fileno())
                inode = facts.st_ino
                file.seek(max(0, self._offset - len(self._mark)))
                is_same = inode == self.inode and file.read(len(self._mark)) == self._mark
                start = file.seek(self._offset if is_same else 0)
                content = file.read(max(0, facts.st_size - start))
        if not is_same:
            self.restart()
            self.inode = inode
        return not is_same, self._objects(content)

    def _objects(self, content: bytes) -> Iterator[dict[str, Any]]:
        """Yields the objects of `content`, which begins where the last line that was read ended; counts those left out.

        The place in the file moves on after each line, so that who stops at an object gets it again.
        """
        for line in _whole_lines(io.BytesIO(content), number=self._number, offset=self._offset):
            if line.content.strip():
                found = self._object(line)
                if found is None:
                    self.num_broken += 1
                else:
                    yield found
                self._num_objects += 1
            self._number = line.number
            self._offset = line.end
            self._mark = (self._mark + line.content)[-_MARK_BYTES:]

    def _object(self, line: Line) -> dict[str, Any] | None:
        """Parses a line; None if it is no object, or one more than may be read."""
        if self._max_lines is not None and self._num_objects >= self._max_lines:
            return None
        return self._parse(line.content, f"{self._name}, line {line.number}")


def _whole_lines(file: BinaryIO, *, number: int = 0, offset: int = 0) -> Iterator[Line]:
    """Yields the lines of a file that have an end; `number` and `offset` are those of what came before.

    Of a line with more than MAX_LINE_BYTES only these are kept, and one more.
    """
    while piece := file.readline(MAX_LINE_BYTES + 1):
        length = len(piece)
        rest = piece
        while rest and not rest.endswith(b"\n"):
            rest = file.readline(MAX_LINE_BYTES)
            length += len(rest)
        if not rest:
            return
        number += 1
        yield Line(number, piece, offset, offset + length)
        offset += length


def json_line(value: Mapping[str, Any]) -> bytes:
    """Converts a mapping to a line of strict JSON: NaN and infinity become null, arrays lists, other types text."""
    text = json.dumps(json_value(value), ensure_ascii=False, allow_nan=False, default=str)
    return text.encode(errors="backslashreplace") + b"\n"  # half a character is an escape of JSON


def json_value(value: Any) -> Any:
    """Makes of a value what strict JSON has: NaN and infinity become null, arrays lists; other types stay."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): json_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_value(item) for item in value]
    return json_value(value.tolist()) if hasattr(value, "tolist") else value  # numpy scalars and arrays
