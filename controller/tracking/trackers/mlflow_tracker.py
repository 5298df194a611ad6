"""Sends the steps of a run to the tracker MLflow, at the server that `MLFLOW_TRACKING_URI` names."""

import json
import logging
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from mlflow.entities import Metric, Param
from mlflow.tracking import MlflowClient

from controller.tracking.trackers.protocol import Run, Tracker, reason_of
from splitppo.dotted_keys import leaves
from splitppo.run_folder.metrics import GLOBAL_STEP
from splitppo.run_folder.samples import SAMPLE_COLUMNS

log = logging.getLogger(__name__)

RUN_ID_TAG = "splitppo.run_id"
_MAX_PARAMS = 100
_MAX_PARAM_LENGTH = 500  # the limits of one request, and of a value in the oldest servers


class MlflowTracker(Tracker):
    """One MLflow run over all starts of a run, found by a tag with the run id; the experiment is the project."""

    def __init__(self, run: Run) -> None:
        """Finds the run at the MLflow server, or makes it; an error if the server does not answer."""
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")  # the feed repeats requests
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "15")
        self._client = MlflowClient()
        self._takes_files = True
        experiment = self._client.get_experiment_by_name(run.project)
        experiment_id = experiment.experiment_id if experiment else self._client.create_experiment(run.project)
        runs = self._client.search_runs([experiment_id], f"tags.`{RUN_ID_TAG}` = '{run.id}'", max_results=1)
        if runs:
            self._run_id = runs[0].info.run_id
            self._client.update_run(self._run_id, status="RUNNING")
        else:
            tags = {RUN_ID_TAG: run.id}
            self._run_id = self._client.create_run(experiment_id, run_name=run.name, tags=tags).info.run_id
            params = (Param(_name(key), str(value)[:_MAX_PARAM_LENGTH]) for key, value in leaves(run.config))
            while batch := list(islice(params, _MAX_PARAMS)):
                self._client.log_batch(self._run_id, params=batch)
        history = self._client.get_metric_history(self._run_id, GLOBAL_STEP) if runs else []
        self.last_step = max((metric.step for metric in history), default=-1)
        self._log_file(run.folder / "config.yaml")

    def log(self, step: int, metrics: Mapping[str, float], samples: Sequence[Sequence[Any]]) -> None:
        """Sends samples as a table, then a step's metrics in one request, of which the server takes all or nothing."""
        if samples:
            table = json.dumps({"columns": SAMPLE_COLUMNS, "data": samples}, ensure_ascii=False)
            self._store(lambda: self._client.log_text(self._run_id, table, f"samples/step_{step:06}.json"))
        now_ms = int(time.time() * 1000)
        values = {_name(name): float(value) for name, value in metrics.items()} | {GLOBAL_STEP: float(step)}
        self._client.log_batch(self._run_id, [Metric(name, value, now_ms, step) for name, value in values.items()])

    def log_report(self, step: int, report: Path) -> None:  # noqa: ARG002
        """Sends report.png as a file of the MLflow run."""
        self._log_file(report)

    def close(self, *, has_failed: bool) -> None:
        """Marks the MLflow run as finished or failed."""
        self._client.set_terminated(self._run_id, "FAILED" if has_failed else "FINISHED")

    def _log_file(self, file: Path) -> None:
        if file.exists():
            self._store(lambda: self._client.log_artifact(self._run_id, str(file)))

    def _store(self, send: Callable[[], None]) -> None:
        """Sends a file to MLflow. If the server answers but its storage of files fails, later files are left out."""
        if not self._takes_files:
            return
        try:
            send()
        except Exception as error:  # noqa: BLE001 - an error of the package for the storage
            self._client.get_run(self._run_id)
            self._takes_files = False
            log.warning("tracker mlflow takes no files, only metrics are sent: %s", reason_of(error))


def _name(name: str) -> str:
    """Replaces the characters that MLflow does not allow in a name; @ becomes _at_, as in verl."""
    return re.sub(r"[^\w\-. :/]", "_", name.replace("@", "_at_"), flags=re.ASCII)
