"""Stores the answers of a judge in a file, so that a repeated training step gets the same answers."""

import json
import logging
import os
from pathlib import Path
from typing import Any, Self

log = logging.getLogger(__name__)


class Answers:
    """Stores a judge's answers by the sha256 of their requests, so that no request is sent twice; a context manager.

    An answer is appended to a JSONL file, `{"request", "answer"}`, as soon as it comes. Only the position of the answer
    in the file stays in memory, some 200 bytes. On entering, a line that a crash has left incomplete is removed from
    the file, with all lines after it. Without a file the answers are stored as long as this object exists.

    Raises:
        OSError: on entering, or later: the file cannot be read or written.
    """

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._places: dict[bytes, tuple[int, int]] = {}  # offset and length of the line
        self._descriptor = -1
        self._end = 0

    def __enter__(self) -> Self:
        if self._file is None:
            self._descriptor = os.memfd_create("answers", os.MFD_CLOEXEC)
        else:
            self._descriptor = os.open(self._file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            self._read(self._file)
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    def find(self, key: str) -> str | None:
        """Reads the stored answer to the request with this sha256 (hexadecimal); None if no answer is stored."""
        if (place := self._places.get(bytes.fromhex(key))) is None:
            return None
        offset, length = place
        return str(json.loads(os.pread(self._descriptor, length, offset))["answer"])

    def add(self, key: str, answer: str) -> None:
        """Appends the answer to the request with this sha256 (hexadecimal) to the file."""
        line = json.dumps({"request": key, "answer": answer}).encode() + b"\n"
        written = 0
        while written < len(line):
            written += os.pwrite(self._descriptor, line[written:], self._end + written)
        self._remember(key, len(line))

    def _remember(self, key: str, length: int) -> None:
        self._places[bytes.fromhex(key)] = (self._end, length)
        self._end += length

    def _read(self, file: Path) -> None:
        with file.open("rb") as lines:
            for line in lines:
                if (entry := _entry(line)) is None:
                    break
                self._remember(str(entry["request"]), len(line))
            size = os.fstat(lines.fileno()).st_size
        if size > self._end:
            log.warning("%s: the last %d bytes are no complete answer and are cut off", file, size - self._end)
            os.ftruncate(self._descriptor, self._end)


def _entry(line: bytes) -> dict[str, Any] | None:
    """Parses one line of the JSONL file of answers; None if the line is not a complete entry."""
    try:
        content = json.loads(line) if line.endswith(b"\n") else None
    except ValueError:
        return None
    if not isinstance(content, dict) or not {"request", "answer"} <= content.keys():
        return None
    key = content["request"]
    return content if isinstance(key, str) and len(key) == 64 and set(key) <= set("0123456789abcdef") else None
