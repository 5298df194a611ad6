"""Writes a run's steps for the tracker TensorBoard, as event files in `<run.dir>/tensorboard`."""

import os
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.plugins.text.metadata import create_summary_metadata
from tensorboard.summary.writer.record_writer import RecordWriter

from controller.tracking.trackers.protocol import Run, Tracker
from splitppo.run_folder.samples import SAMPLE_COLUMNS


class TensorboardTracker(Tracker):
    """Writes scalars, samples and the report by TensorBoard's own writer, because tensorboardX loads torch."""

    def __init__(self, run: Run, sent_step: int) -> None:
        """Opens a new event file beside those of earlier starts; readers drop the steps after `sent_step` in these."""
        folder = run.folder / "tensorboard"
        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{time.time_ns()}"
        self._file = (folder / name).open("wb")
        self._writer = RecordWriter(self._file)
        self._write(file_version="brain.Event:2")
        self._drop_from(sent_step + 1)

    def log(self, step: int, metrics: Mapping[str, float], samples: Sequence[Sequence[Any]]) -> None:
        """Writes a step as one TensorBoard scalar per metric, and the samples as a text in Markdown."""
        values = [Summary.Value(tag=name, simple_value=float(value)) for name, value in metrics.items()]
        if samples:
            text = TensorProto(dtype=DT_STRING, string_val=[_markdown(samples).encode()])
            text.tensor_shape.SetInParent()
            values.append(Summary.Value(tag="samples", metadata=create_summary_metadata("samples", ""), tensor=text))
        self._write(step=step, summary=Summary(value=values))

    def log_report(self, step: int, report: Path) -> None:
        """Writes report.png as a TensorBoard image."""
        png = report.read_bytes()
        width, height = struct.unpack(">II", png[16:24])  # the first chunk of a PNG has its size
        image = Summary.Image(encoded_image_string=png, width=width, height=height, colorspace=4)
        self._write(step=step, summary=Summary(value=[Summary.Value(tag="report", image=image)]))

    def rewind(self) -> bool:
        """Writes an event by which TensorBoard's readers drop every step."""
        self._drop_from(0)
        return True

    def close(self, *, has_failed: bool) -> None:  # noqa: ARG002
        """Closes the event file."""
        self._file.close()

    def _drop_from(self, step: int) -> None:
        self._write(step=step, session_log=SessionLog(status=SessionLog.START))

    def _write(self, **event: Any) -> None:
        self._writer.write(Event(wall_time=time.time(), **event).SerializeToString())
        self._writer.flush()


def _markdown(samples: Sequence[Sequence[Any]]) -> str:
    rows = [SAMPLE_COLUMNS, ("---",) * len(SAMPLE_COLUMNS), *samples]
    return "\n".join("| " + " | ".join(map(_cell, row)) + " |" for row in rows)


def _cell(value: Any) -> str:
    return str(value).replace("\\", "\\\\").replace("|", "\\|").replace("\n", "<br>")
