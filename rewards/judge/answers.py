"""Stores the answers of a judge in a file, so that a repeated training step gets the same answers."""

import logging
from pathlib import Path
from typing import Self

from splitppo.run_folder.append_log import AppendLog, json_line, object_of

log = logging.getLogger(__name__)


class Answers:
    """Stores a judge's answers by the sha256 of their requests, so that no request is sent twice.

    An answer is appended to a log, `{"request", "answer"}`, as soon as it comes. Only the position of the answer in the
    file stays in memory, some 200 bytes. `open` removes a line that is no complete answer from the file, with all lines
    after it. Without a file the answers are stored as long as this object exists.

    Raises:
        OSError: by any method: the file cannot be read or written.
    """

    def __init__(self, file: Path | None) -> None:
        self._log = None if file is None else AppendLog(file)
        self._starts: dict[bytes, int] = {}  # in the file
        self._answers: dict[bytes, str] = {}  # without a file

    def open(self) -> Self:
        """Reads where the stored answers are; called once, before all else."""
        if self._log is not None:
            self._read(self._log)
        return self

    def find(self, key: str) -> str | None:
        """Reads the stored answer to the request with this sha256 (hexadecimal); None if no answer is stored."""
        request = bytes.fromhex(key)
        if self._log is None:
            return self._answers.get(request)
        if (start := self._starts.get(request)) is None:
            return None
        return str(object_of(self._log.line_at(start), str(self._log.path))["answer"])

    def add(self, key: str, answer: str) -> None:
        """Stores the answer to the request with this sha256 (hexadecimal)."""
        request = bytes.fromhex(key)
        if self._log is None:
            self._answers[request] = answer
        else:
            self._starts[request] = self._log.append(json_line({"request": key, "answer": answer}))

    def _read(self, answers: AppendLog) -> None:
        """Finds where each request stands in the file; what stands behind the last complete line is cut off."""
        answers.path.touch()
        end = 0
        for line in answers.lines():
            if (request := _request_of(line.content)) is None:
                break
            self._starts[request] = line.start
            end = line.end
        if num_cut := answers.cut_after(end):
            log.warning("%s: the last %d bytes are no complete answer and are cut off", answers.path, num_cut)


def _request_of(line: bytes) -> bytes | None:
    """Returns the sha256 of the request in a line of the file; None if the line is not a complete entry."""
    try:
        entry = object_of(line, "")
        request = bytes.fromhex(entry["request"])
        _ = entry["answer"]
    except (ValueError, LookupError, TypeError):
        return None
    return request if len(request) == 32 else None
