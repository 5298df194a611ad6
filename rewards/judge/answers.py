"""Stores the answers of a judge in a file, so that a repeated training step gets the same answers."""

import json
import logging
import os
from io import BytesIO
from pathlib import Path
from typing import IO, Self

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
        self._lines: IO[bytes] = BytesIO()
        self._offsets: dict[bytes, int] = {}

    def __enter__(self) -> Self:
        if self._file is not None:
            self._lines = self._file.open("a+b")
            self._read(self._file)
        return self

    def __exit__(self, *_: object) -> None:
        self._lines.close()

    def find(self, key: str) -> str | None:
        """Reads the stored answer to the request with this sha256 (hexadecimal); None if no answer is stored."""
        if (offset := self._offsets.get(bytes.fromhex(key))) is None:
            return None
        self._lines.seek(offset)
        return str(json.loads(self._lines.readline())["answer"])

    def add(self, key: str, answer: str) -> None:
        """Appends the answer to the request with this sha256 (hexadecimal) to the file."""
        offset = self._lines.seek(0, os.SEEK_END)
        self._lines.write(json.dumps({"request": key, "answer": answer}).encode() + b"\n")
        self._lines.flush()
        self._offsets[bytes.fromhex(key)] = offset

    def _read(self, file: Path) -> None:
        size = self._lines.tell()
        end = self._lines.seek(0)
        for line in self._lines:
            if (request := _request_of(line)) is None:
                break
            self._offsets[request] = end
            end += len(line)
        if size > end:
            log.warning("%s: the last %d bytes are no complete answer and are cut off", file, size - end)
            self._lines.truncate(end)


def _request_of(line: bytes) -> bytes | None:
    """Returns the sha256 of the request in a line of the file; None if the line is not a complete entry."""
    try:
        entry = json.loads(line if line.endswith(b"\n") else b"")
        request = bytes.fromhex(entry["request"])
        _ = entry["answer"]
    except (ValueError, LookupError, TypeError, RecursionError):
        return None
    return request if len(request) == 32 else None
