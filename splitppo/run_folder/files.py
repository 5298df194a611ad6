"""Opens files of a run folder that somebody else may have made: never through a link, never beyond a size."""

import json
import os
import re
import stat
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from splitppo.run_folder.append_log import Follower

_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_STEP_FILE = re.compile(r"(0|[1-9][0-9]{0,8})\.parquet")
MAX_JSON_BYTES = 16 << 20
MAX_LINES_BYTES = 512 << 20
MAX_LINE_BYTES = 4 << 20
MAX_LINES = 1 << 20
MAX_DEPTH = 64
MAX_PARQUET_BYTES = 512 << 20


class Unreadable(Exception):
    """Something of a run folder that is missing or broken; the text is a sentence for the page."""


@dataclass(frozen=True)
class RunDir:
    """One run folder; every access opens it anew, so that a folder that was removed is noticed."""

    path: Path

    def open(self, *names: str, max_bytes: int = MAX_JSON_BYTES) -> BinaryIO:
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
        if facts.st_size > max_bytes:
            os.close(descriptor)
            raise Unreadable(f"{name} has {facts.st_size:,} bytes; the viewer reads at most {max_bytes:,}.")
        return os.fdopen(descriptor, "rb")

    def _descend(self, names: tuple[str, ...], name: str) -> int:
        """Opens a file, folder by folder from the run folder on, and returns its descriptor; none may be a link.

        `name` is how the file is called in errors.

        Raises:
            Unreadable: a folder or the file cannot be opened.
        """
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


def follower(folder: RunDir, name: str) -> Follower:
    """Returns a reader of a log in a run folder that leaves out, and counts, what is too much or no object."""

    def open_file() -> BinaryIO | None:
        with suppress(Unreadable):
            return folder.open(name, max_bytes=MAX_LINES_BYTES)
        return None

    def parse(line: bytes, _: str) -> dict[str, Any] | None:
        with suppress(Unreadable):
            return json_object(line, name)
        return None

    return Follower(open_file, name, parse=parse, max_lines=MAX_LINES)


def json_object(content: bytes, name: str) -> dict[str, Any]:
    """Reads one JSON object, else raises Unreadable.

    `name` is that of the file: a log (.jsonl) has a smaller limit, for one line. Nesting is counted only where brackets
    are many.
    """
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
