"""Where metrics go: metrics.jsonl always, TensorBoard by default; and every rollout as JSONL, if asked.

What was written after the step that a run restores is taken back, so a curve has every step once.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

from controller.files import write_atomically

METRICS_FILE = "metrics.jsonl"
_NUMBERS = itertools.count()  # event files of this process


class Tracker(Protocol):
    """Takes the metrics of each step, once, in order."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes the metrics of a step; they are safe when this returns."""

    def cut_back(self, step: int) -> None:
        """Takes back what was logged for later steps; -1 takes back everything."""

    def close(self) -> None:
        """Ends the tracker."""


def open_trackers(run_dir: Path, names: Sequence[str], *, restored_step: int | None) -> list[Tracker]:
    """metrics.jsonl and the named trackers, cut back to the restored step; None starts them afresh."""
    trackers: list[Tracker] = [JsonlTracker(run_dir / METRICS_FILE)]
    for name in names:
        if name != "tensorboard":
            raise ValueError(f"unknown tracker {name!r}; known: tensorboard")
        trackers.append(TensorBoardTracker(run_dir / "tensorboard"))
    for tracker in trackers:
        tracker.cut_back(-1 if restored_step is None else restored_step)
    return trackers


class JsonlTracker:
    """One JSON object per line and step: {"step": 3, metric: number, ...}; numbers that are not finite become null."""

    def __init__(self, path: Path) -> None:
        """Goes on with an existing file; a last line that a crash has torn is removed."""
        self._path = path
        self._last_step = -1
        self.cut_back(2**63)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Appends the line of a step.

        Raises:
            ValueError: the step does not come after the last one.
        """
        if step <= self._last_step:
            raise ValueError(f"metrics of step {step} come after those of step {self._last_step}")
        line = json_line({"step": step, **{name: _plain_number(value) for name, value in metrics.items()}})
        with self._path.open("ab") as file:
            file.write(line.encode())
            file.flush()
            os.fsync(file.fileno())
        self._last_step = step

    def cut_back(self, step: int) -> None:
        """Removes the lines of later steps."""
        content = self._path.read_bytes() if self._path.exists() else None
        kept = [row for row in read_metrics(self._path) if row["step"] <= step]
        lines = "".join(json_line(row) for row in kept).encode()
        if lines != content:
            write_atomically(self._path, lines)
        self._last_step = kept[-1]["step"] if kept else -1

    def close(self) -> None:
        """Nothing is held open."""


class TensorBoardTracker:
    """Scalars for TensorBoard.

    Its own record writer is used: tensorboardX imports torch where there is one. Not its event file writer, which
    writes in a thread: a disk that is full would be heard of late, and with a traceback.
    """

    def __init__(self, directory: Path) -> None:
        """Opens a new event file beside those of earlier starts."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter  # slow to import

        directory.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{next(_NUMBERS)}"
        self._file = (directory / name).open("wb")
        self._writer = RecordWriter(self._file)
        self._write(Event(wall_time=time.time(), file_version="brain.Event:2"))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes one scalar per metric."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=float(value)) for name, value in metrics.items()]
        self._write(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))

    def cut_back(self, step: int) -> None:
        """Tells readers to drop later steps: event files are never rewritten."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        start = SessionLog(status=SessionLog.START)
        self._write(Event(wall_time=time.time(), step=step + 1, session_log=start))

    def _write(self, event: Any) -> None:
        self._writer.write(event.SerializeToString())
        self._writer.flush()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


class RolloutDump:
    """Every rollout of a step in `<run.dir>/rollouts/{train,val}/{step}.jsonl`."""

    def __init__(self, directory: Path) -> None:
        """`directory` is made with the first file."""
        self._directory = directory

    def write(self, split: Literal["train", "val"], step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        """Writes the rollouts of a step, one JSON object per response."""
        write_atomically(self._directory / split / f"{step}.jsonl", "".join(json_line(row) for row in rows))

    def cut_back(self, step: int) -> None:
        """Removes the files of later steps; -1 removes all."""
        for file in self._directory.glob("*/*.jsonl"):
            if file.stem.isdigit() and int(file.stem) > step:
                file.unlink()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics file up to the first one that is torn; null stays None. Empty if there is no file."""
    rows: list[dict[str, Any]] = []
    if not path.exists():
        return rows
    for line in path.read_bytes().splitlines(keepends=True):
        try:
            row = json.loads(line) if line.endswith(b"\n") else None
        except ValueError:
            row = None
        if not isinstance(row, dict) or not isinstance(row.get("step"), int):
            break
        rows.append(row)
    return rows


def json_line(value: Mapping[str, Any]) -> str:
    """One line of strict JSON: numbers that are not finite become null, unknown types their text."""
    return json.dumps(_finite(value), ensure_ascii=False, allow_nan=False, default=str) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if hasattr(value, "tolist"):  # numpy scalars and arrays
        return _finite(value.tolist())
    return value


def _plain_number(value: Any) -> int | float:
    """A metric as JSON has it; numpy scalars become Python numbers."""
    return value if isinstance(value, int) else float(value)
