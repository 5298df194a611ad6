"""Reads a JSONL file of steps (metrics.jsonl, samples.jsonl) while another process writes it."""

import os
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from controller.tracking.step_file import check_step
from splitppo.jsonl import check_is_file, json_object


class StepReader:
    """Reads complete lines of a StepFile one after another; begins again at the first line if the file was replaced."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None
        self._row: dict[str, Any] | None = None
        self._number = 0  # the number of the last line that was read
        self.inode = 0  # the inode of the file; 0 before a file is open

    def peek(self) -> dict[str, Any] | None:
        """Parses and returns the next line, the same one until `take` is called; None if no further line is written.

        Raises:
            ValueError: the line is broken; the message names file and line. The file is then read from the beginning.
                Or this is no file, but a pipe.
        """
        if self._row is None:
            self._row = self._read() or (self._read() if self._reopened() else None)
        return self._row

    def take(self) -> None:
        """Moves past the line that `peek` has returned."""
        self._row = None

    def close(self) -> None:
        """Closes the file of steps; the next `peek` begins with the first line of the file."""
        if self._file is not None:
            self._file.close()
        self._file = None
        self._row = None
        self._number = 0
        self.inode = 0

    def _read(self) -> dict[str, Any] | None:
        if self._file is None:
            return None
        while (line := self._file.readline()).endswith(b"\n"):
            self._number += 1
            if not line.strip():
                continue
            place = f"{self._path}, line {self._number}"
            try:
                return check_step(json_object(line, place), place)
            except ValueError:
                self.close()
                raise
        self._file.seek(-len(line), os.SEEK_CUR)
        return None

    def _reopened(self) -> bool:
        """Opens the file at the path if it was replaced by another file since; returns True if it has opened one."""
        check_is_file(self._path)
        with suppress(FileNotFoundError):
            if self._path.stat().st_ino != self.inode:
                self.close()
                self._file = self._path.open("rb")
                self.inode = os.fstat(self._file.fileno()).st_ino
                return True
        return False
