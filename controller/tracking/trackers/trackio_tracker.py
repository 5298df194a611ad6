"""Sends a run's steps to the tracker trackio: a local database, or `TRACKIO_SERVER_URL` or `TRACKIO_SPACE_ID`."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import trackio
from trackio.sqlite_storage import SQLiteStorage

from controller.tracking.trackers.protocol import Run, Tracker
from splitppo.run_folder.samples import SAMPLE_COLUMNS


class TrackioTracker(Tracker):
    """One trackio run over all starts, found by its name: `run.name` and the first 8 digits of the run id."""

    def __init__(self, run: Run) -> None:
        """Starts the trackio run, or continues it."""
        name = f"{run.name}-{run.id[:8]}"
        is_remote = os.environ.get("TRACKIO_SERVER_URL") or os.environ.get("TRACKIO_SPACE_ID")
        if not is_remote:
            last_step = SQLiteStorage.get_max_step_for_run(run.project, name)
            self.last_step = -1 if last_step is None else int(last_step)
        self._run = trackio.init(
            project=run.project,
            name=name,
            config=dict(run.config),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def log(self, step: int, metrics: Mapping[str, float], samples: Sequence[Sequence[Any]]) -> None:
        """Passes a step's metrics and samples to trackio, which writes them in the background."""
        values: dict[str, Any] = dict(metrics)
        if samples:
            rows = [[*map(str, row[:-1]), row[-1]] for row in samples]
            values["samples"] = trackio.Table(columns=list(SAMPLE_COLUMNS), data=rows)
        self._run.log(values, step=step)

    def log_report(self, step: int, report: Path) -> None:
        """Sends report.png to trackio as an image."""
        self._run.log({"report": trackio.Image(str(report))}, step=step)

    def close(self, *, has_failed: bool) -> None:  # noqa: ARG002
        """Waits until trackio has written everything."""
        self._run.finish()
