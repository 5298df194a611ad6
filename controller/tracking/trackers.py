"""Where metrics go: metrics.jsonl always, TensorBoard by default; and every rollout as JSONL, if asked.

What was written after the step that a run restores is taken back, so a curve has every step once; a restored step of -1
stands for a run that starts afresh.
"""

import itertools
import json
import math
import os
import socket
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

from splitppo.atomic_write import write_atomically
from splitppo.jsonl import read_jsonl

METRICS_FILE = "metrics.jsonl"
_NUMBERS = itertools.count()  # event files of this process


class Tracker(Protocol):
    """Takes the metrics of each step, once, in order; is opened anew where a run is restored."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes the metrics of a step; they are safe when this returns."""

    def close(self) -> None:
        """Ends the tracker."""


def open_trackers(run_dir: Path, names: Sequence[str], *, restored_step: int) -> list[Tracker]:
    """metrics.jsonl and the named trackers, without the steps after `restored_step`."""
    trackers: list[Tracker] = [JsonlTracker(run_dir / METRICS_FILE, restored_step)]
    for name in names:
        if name != "tensorboard":
            raise ValueError(f"unknown tracker {name!r}; known: tensorboard")
        trackers.append(TensorBoardTracker(run_dir / "tensorboard", restored_step))
    return trackers


class JsonlTracker:
    """One JSON object per line and step: {"step": 3, metric: number, ...}; numbers that are not finite become null."""

    def __init__(self, path: Path, restored_step: int = sys.maxsize) -> None:
        """Goes on with an existing file; later steps are removed, and so is a last line that a crash has torn."""
        self._path = path
        content = path.read_bytes() if path.exists() else None
        kept = [row for row in read_metrics(path) if row["step"] <= restored_step]
        lines = b"".join(map(json_line, kept))
        if lines != content:
            write_atomically(path, lines)
        self._last_step = kept[-1]["step"] if kept else -1

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Appends the line of a step; ValueError if it does not come after the last one."""
        if step <= self._last_step:
            raise ValueError(f"metrics of step {step} come after those of step {self._last_step}")
        with self._path.open("ab") as file:
            file.write(json_line({"step": step, **metrics}))
            file.flush()
            os.fsync(file.fileno())
        self._last_step = step

    def close(self) -> None:
        """Nothing is held open."""


class TensorBoardTracker:
    """Scalars for TensorBoard, by its own record writer: tensorboardX imports torch where there is one.

    Not by its event file writer, which has a thread: a disk that is full would be heard of late, with a traceback.
    """

    def __init__(self, directory: Path, restored_step: int = -1) -> None:
        """Opens a new event file beside those of earlier starts, and tells readers to drop their later steps."""
        from tensorboard.compat.proto.event_pb2 import SessionLog  # slow to import, as all of it
        from tensorboard.summary.writer.record_writer import RecordWriter

        directory.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{next(_NUMBERS)}"
        self._file = (directory / name).open("wb")
        self._writer = RecordWriter(self._file)
        self._write(file_version="brain.Event:2")
        self._write(step=restored_step + 1, session_log=SessionLog(status=SessionLog.START))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes one scalar per metric."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=float(value)) for name, value in metrics.items()]
        self._write(step=step, summary=Summary(value=values))

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def _write(self, **event: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self._writer.write(Event(wall_time=time.time(), **event).SerializeToString())
        self._writer.flush()


class RolloutDump:
    """Every rollout of a step in `<run.dir>/rollouts/{train,val}/{step}.jsonl`; the folder is made with the first."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def write(self, split: Literal["train", "val"], step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        """Writes the rollouts of a step, one JSON object per response."""
        write_atomically(self._directory / split / f"{step}.jsonl", b"".join(map(json_line, rows)))

    def cut_back(self, restored_step: int) -> None:
        """Removes the files of later steps."""
        for file in self._directory.glob("*/*.jsonl"):
            if file.stem.isdigit() and int(file.stem) > restored_step:
                file.unlink()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics file up to the first one that is torn; null stays None. Empty if there is no file."""
    if not path.exists():
        return []
    rows = (row for _, row in read_jsonl(path, until_torn=True))
    return list(itertools.takewhile(lambda row: isinstance(row.get("step"), int), rows))


def json_line(value: Mapping[str, Any]) -> bytes:
    """One line of strict JSON: numbers that are not finite become null, arrays lists, unknown types their text."""
    return json.dumps(_finite(value), ensure_ascii=False, allow_nan=False, default=str).encode() + b"\n"


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return _finite(value.tolist()) if hasattr(value, "tolist") else value  # numpy scalars and arrays
