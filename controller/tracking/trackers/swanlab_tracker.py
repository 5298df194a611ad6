"""The tracker SwanLab, online or offline, by its own variables and login (`SWANLAB_MODE`, `SWANLAB_API_KEY`, ...)."""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import swanlab

from controller.tracking.step_file import SAMPLE_COLUMNS
from controller.tracking.trackers.protocol import Run, Tracker

_ID_LENGTH = 21  # SwanLab takes no other length


class SwanlabTracker(Tracker):
    """One SwanLab experiment over all starts; offline each start leaves a folder in `<run.dir>/swanlog`."""

    def __init__(self, run: Run) -> None:
        """Starts the experiment, or continues it."""
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
        """Passes a step to SwanLab, each sample as a text."""
        values: dict[str, Any] = dict(metrics)
        if samples:
            values["samples"] = [swanlab.Text(_text(row)) for row in samples]
        self._run.log(values, step=step)

    def log_report(self, step: int, report: Path) -> None:
        """Sends the report as an image."""
        self._run.log({"report": swanlab.Image(str(report))}, step=step)

    def close(self, *, has_failed: bool) -> None:  # noqa: ARG002
        """Waits until everything is uploaded, or written if SwanLab is offline."""
        self._run.finish()


def _text(sample: Sequence[Any]) -> str:
    return "\n".join(f"{column}: {value}" for column, value in zip(SAMPLE_COLUMNS, sample, strict=True))
