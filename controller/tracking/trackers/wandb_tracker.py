"""Sends a run's steps to the tracker Weights & Biases, online or offline (`WANDB_MODE`, `WANDB_API_KEY` or a login)."""

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import wandb

from controller.tracking.trackers.protocol import Run, Tracker, reason_of
from splitppo.run_folder.samples import SAMPLE_COLUMNS

log = logging.getLogger(__name__)


class WandbTracker(Tracker):
    """One W&B run over all starts; offline each start leaves a folder in `<run.dir>/wandb`, for `wandb sync`."""

    def __init__(self, run: Run) -> None:
        """Starts the W&B run, or continues it; an error if its server does not answer."""
        settings = wandb.Settings(console="off", silent=True, disable_git=True, disable_code=True, x_disable_stats=True)
        self._run = wandb.init(
            project=run.project,
            name=run.name,
            id=run.id,
            resume="allow",
            reinit="create_new",
            dir=str(run.folder),
            config=dict(run.config),
            allow_val_change=True,
            settings=settings,
        )
        self.last_step = None if self._run.offline or self._run.disabled else self._run.starting_step - 1

    def log(self, step: int, metrics: Mapping[str, float], samples: Sequence[Sequence[Any]]) -> None:
        """Passes a step to W&B without waiting for its server. The step can get more data until the next step."""
        self._run.log(dict(metrics), step=step)
        if samples:
            rows = [[*map(str, row[:-1]), row[-1]] for row in samples]
            self._add(step, "samples", lambda: wandb.Table(list(SAMPLE_COLUMNS), rows))

    def log_report(self, step: int, report: Path) -> None:
        """Adds report.png to the last step of the W&B run."""
        self._add(step, "report", lambda: wandb.Image(str(report)))

    def _add(self, step: int, name: str, make: Callable[[], Any]) -> None:
        """Adds a table or an image to a step in W&B. If the server does not take it, a warning is logged."""
        try:
            self._run.log({name: make()}, step=step)
        except Exception as error:  # noqa: BLE001 - an error type of the client
            log.warning("tracker wandb has no %s of step %d: %s", name, step, reason_of(error))

    def close(self, *, has_failed: bool) -> None:
        """Waits until everything is uploaded to W&B, or written to disk if it is offline."""
        self._run.finish(exit_code=int(has_failed))
