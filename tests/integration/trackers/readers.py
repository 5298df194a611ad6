"""Reads a run back from each tracker with the tracker's own tools: `python readers.py NAME RUN_DIR` prints JSON.

Stands alone, since the Python that has the clients need not be that of the tests:
    {"name": run name, "project": ..., "steps": [[step, critic/score/mean], ...] in the order of arrival,
     "samples": steps with samples, "report": whether the report is there, "config": a key of it}
"""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

METRIC = "critic/score/mean"


def read_tensorboard(folder: Path) -> dict[str, Any]:
    """From the event files, as TensorBoard's server loads them."""
    from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    events = EventAccumulator(
        str(folder / "tensorboard"), tensor_size_guidance=dict.fromkeys(("scalars", "text", "images"), 0)
    )
    events.Reload()
    tags = events.Tags()["tensors"]
    return {
        "steps": [[event.step, make_ndarray(event.tensor_proto).item()] for event in events.Tensors(METRIC)],
        "samples": [event.step for event in events.Tensors("samples")],
        "report": "report" in tags,
    }


def read_wandb(folder: Path) -> dict[str, Any]:
    """From what each start has left for `wandb sync`, in the order in which that takes them."""
    from wandb.proto import wandb_internal_pb2

    logged: dict[str, Any] = {"runs": [], "steps": [], "samples": [], "report": False, "ends": []}
    for file in sorted((folder / "wandb").glob("offline-run-*/*.wandb")):
        for content in log_records(file.read_bytes()):
            record = wandb_internal_pb2.Record.FromString(content)
            if record.HasField("run"):
                logged |= {"name": record.run.display_name, "project": record.run.project}
                logged["config"] = {item.key: json.loads(item.value_json) for item in record.run.config.update}
                logged["runs"].append(record.run.run_id)
            elif record.HasField("history"):
                values = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
                step = record.history.step.num
                logged["steps"] += [[step, json.loads(values[METRIC])]] if METRIC in values else []
                logged["samples"] += [step] if any(name.startswith("samples") for name in values) else []
                logged["report"] |= any(name.startswith("report") for name in values)
            elif record.HasField("exit"):
                logged["ends"].append(record.exit.exit_code)
    return logged | {"config": logged["config"]["run"]["name"]}


def log_records(content: bytes) -> Iterator[bytes]:
    """The records of a file in LevelDB's log format, behind W&B's header of 7 bytes."""
    position, record, block = 7, b"", 1 << 15
    while position + 7 <= len(content):
        if (room := block - position % block) < 7:
            position += room
            continue
        _, length, kind = struct.unpack("<IHB", content[position : position + 7])
        record += content[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            yield record
            record = b""


def read_mlflow(folder: Path) -> dict[str, Any]:
    """From the server that MLFLOW_TRACKING_URI names."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient()
    run_id = json.loads((folder / "controller.epoch").read_text())["run_id"]
    experiment = client.get_experiment_by_name("proofs")
    (run,) = client.search_runs([experiment.experiment_id], f"tags.`splitppo.run_id` = '{run_id}'")
    files = {
        file.path: client.list_artifacts(run.info.run_id, file.path) for file in client.list_artifacts(run.info.run_id)
    }
    return {
        "name": run.info.run_name,
        "project": experiment.name,
        "steps": [[point.step, point.value] for point in client.get_metric_history(run.info.run_id, METRIC)],
        "samples": [int(Path(file.path).stem.removeprefix("step_")) for file in files.get("samples", [])],
        "report": "report.png" in files,
        "config": run.data.params["run.name"],
        "ends": [run.info.status],
    }


def read_swanlab(folder: Path) -> dict[str, Any]:
    """From what each start has left for `swanlab sync`."""
    from swanlab.proto.swanlab.record.v1 import record_pb2
    from swanlab.sdk.internal.core_python.store import DataStoreReader

    logged: dict[str, Any] = {"runs": [], "steps": [], "samples": [], "report": False}
    for file in sorted((folder / "swanlog").glob("run-*/*.swanlab")):
        reader = DataStoreReader()
        reader.open(file)
        while (content := reader.scan()) is not None:
            record = record_pb2.Record.FromString(content)
            if record.HasField("start"):
                logged |= {"name": record.start.name, "project": record.start.project}
                logged["runs"].append(record.start.id)
            elif record.HasField("scalar") and record.scalar.key == METRIC:
                logged["steps"].append([record.scalar.step, record.scalar.value.number])
            elif record.HasField("media"):
                logged["samples"] += [record.media.step] if record.media.key == "samples" else []
                logged["report"] |= record.media.key == "report"
        reader.close()
    return logged


def read_trackio(folder: Path) -> dict[str, Any]:
    """From the database in TRACKIO_DIR."""
    from trackio.sqlite_storage import SQLiteStorage

    (run,) = SQLiteStorage.get_run_records("proofs")
    rows = SQLiteStorage.get_logs("proofs", run["name"])
    config = SQLiteStorage.get_run_config("proofs", run["name"])
    return {
        "name": run["name"],
        "project": "proofs",
        "steps": [[row["step"], row[METRIC]] for row in rows if METRIC in row],
        "samples": [row["step"] for row in rows if "samples" in row],
        "report": any("report" in row for row in rows),
        "config": config["run"]["name"],
    }


if __name__ == "__main__":
    tracker, run_dir = sys.argv[1:]
    sys.stdout.write("\n" + json.dumps(globals()[f"read_{tracker}"](Path(run_dir))))
