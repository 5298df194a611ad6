"""Reads a file of steps while another process writes it."""

import json
import os
from pathlib import Path
from typing import Any, BinaryIO


class StepReader:
    """The complete lines of a StepFile, one after another; from the first one again once the file was replaced."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None
        self._row: dict[str, Any] | None = None
        self.inode = 0  # of the file being read; 0 before there is one

    def peek(self) -> dict[str, Any] | None:
        """The next line, which stays the next one until `take`; None where no more is written yet."""
        if self._row is None:
            self._row = self._read() or (self._read() if self._reopened() else None)
        return self._row

    def take(self) -> None:
        """Passes over the line that `peek` has shown."""
        self._row = None

    def close(self) -> None:
        """Closes the file; the next `peek` begins with its first line."""
        if self._file is not None:
            self._file.close()
        self._file, self._row, self.inode = None, None, 0

    def _read(self) -> dict[str, Any] | None:
        if self._file is None:
            return None
        start = self._file.tell()
        line = self._file.readline()
        if not line.endswith(b"\n"):
            self._file.seek(start)
            return None
        row: dict[str, Any] = json.loads(line)
        return row

    def _reopened(self) -> bool:
        """Whether there is another file under the name than the one that was read, which is then opened."""
        try:
            file = self._path.open("rb")
        except FileNotFoundError:
            return False
        if (inode := os.fstat(file.fileno()).st_ino) == self.inode:
            file.close()
            return False
        self.close()
        self._file, self.inode = file, inode
        return True
