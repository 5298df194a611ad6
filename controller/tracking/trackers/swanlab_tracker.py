"""Sends a run's steps to the tracker SwanLab, online or offline (`SWANLAB_MODE`, `SWANLAB_API_KEY` or a login)."""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import swanlab

from controller.tracking.trackers.protocol import Run, Tracker
from splitppo.run_folder.samples import SAMPLE_COLUMNS

_ID_LENGTH = 21  # SwanLab takes no other length


class SwanlabTracker(Tracker):
    """One SwanLab experiment over all starts of a run; offline each start leaves a folder in `<run.dir>/swanlog`."""

    def __init__(self, run: Run) -> None:
        """Starts the SwanLab experiment, or continues it."""
        self._run = swanlab.init(
            project=run.project,
            experiment_name=run.name,
            id=hashlib.sha256(run.id.encode()).hexdigest()[:_ID_LENGTH],
            resume="allow",
            reinit=True,
            logdir=str(run.folder / "swanlog"),
            config=dict(run.config),
        )

    def log(self, step: int, metrics: Mapping[str, float], samples: Sequence[Sequence[Any]]) -> None:
        """Passes a step's metrics to SwanLab, and each sample as a text."""
        values: dict[str, Any] = dict(metrics)
        if samples:
            values["samples"] = [swanlab.Text(_text(row)) for row in samples]
        self._run.log(values, step=step)

    def log_report(self, step: int, report: Path) -> None:
        """Sends report.png to SwanLab as an image."""
        self._run.log({"report": swanlab.Image(str(report))}, step=step)

    def close(self, *, has_failed: bool) -> None:  # noqa: ARG002
        """Waits until everything is uploaded to SwanLab, or written to disk if it is offline."""
        self._run.finish()


def _text(sample: Sequence[Any]) -> str:
    return "\n".join(f"{column}: {value}" for column, value in zip(SAMPLE_COLUMNS, sample, strict=True))
