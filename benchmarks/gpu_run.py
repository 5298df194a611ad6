"""The case of benchmarks.gpu_proof that makes PPO runs by the real controller, with both groups on one device."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from benchmarks.gpu_engine import MODES, Place, Values, drop_engine, model_folder
from benchmarks.overlap import Row, median
from controller.tracking.step_file import METRICS_FILE, read_metrics
from controller.tracking.timeline import read_trace
from recipes.rows import write_parquet
from recipes.sort_letters import task

ROOT = Path(__file__).resolve().parents[1]


def run(place: Place, *, size: str, mode: str) -> Values:
    """Makes a run, and again with a stop half-way and a critic that is killed after it; compares their weights."""
    drop_engine()
    num_steps = 2 if place.tiny else 6
    half = num_steps // 2
    inputs = place.folder / "inputs"
    write_parquet(task.rows_of(task.split_words(0).train, "train"), inputs / "train.parquet")
    config = inputs / "run.yaml"
    config.write_text(yaml.safe_dump(_tree(place, str(model_folder(place, size)), mode, save_freq=half)))
    whole, broken = place.folder / "whole", place.folder / "broken"
    rows = _finished(config, whole, num_steps)[1:]
    digest = _digest(whole)
    shutil.rmtree(whole)  # its checkpoints
    if not place.tiny:  # each start takes seconds
        _finished(config, broken, half)
    point = "critic.update.begin"
    _finished(config, broken, num_steps, f"debug.failpoints={{{point}: {{step: {half + 1}, action: kill}}}}")
    [mark] = (broken / "failpoints").glob("*.fired")
    killed_s = json.loads(mark.read_text())["unix_s"]
    calls_s = (span.started_s for span in read_trace(broken / "trace.json") if span.pool == "critic")
    values = {
        **{f"{name} s": median(rows, f"timing_s/{name}") for name in ("step", "gen", "update_actor", "update_critic")},
        "sampler - trainer, mean nats": median(rows, "training/rollout_log_probs_diff_mean"),
        "max nats": max(row["training/rollout_log_probs_diff_max"] for row in rows),
        "actor's peak GiB": rows[-1].get("perf/max_memory_allocated_gb"),
        "from a kill to the next call s": min(began_s for began_s in calls_s if began_s > killed_s) - killed_s,
        "same weights": _digest(broken) == digest,
    }
    shutil.rmtree(broken)
    if not values["same weights"]:
        values["failed"] = "the run with a stop and a kill ended with other weights than the run without"
    return values


def _tree(place: Place, model: str, mode: str, *, save_freq: int) -> dict[str, Any]:
    device = {} if place.tiny else {"devices": [0]}
    trained = {"dtype": "bf16", "lr": 1e-5, **MODES[mode]}
    num_rows, length = (8, 16) if place.tiny else (64, 128)
    batch = {"train_batch_size": num_rows, "max_response_length": length}
    return {
        "run": {"dir": "none", "total_steps": 1},
        "data": {"train_files": str(place.folder / "inputs" / "train.parquet"), "max_prompt_length": 16, **batch},
        "algorithm": {"use_kl_in_reward": True, "rollout_correction": {"bypass_mode": False}},
        "actor": {"model": model, "ppo_mini_batch_size": num_rows // 2, **trained},
        "critic": trained,
        "evaluation": {"test_freq": -1},
        "checkpoint": {"save_freq": save_freq, "keep": 1, "save_hf_model": False},
        "services": {"allow_shared_devices": True, "restart_backoff_s": 0.1, "actor": device, "critic": device},
        "tracking": {"trackers": []},
    }


def _finished(config: Path, folder: Path, num_steps: int, *overrides: str) -> Sequence[Row]:
    """Runs the controller until so many steps are done; returns the metrics of the steps."""
    keys = [f"run.dir={folder}", f"run.total_steps={num_steps}", *overrides]
    command = [sys.executable, "-m", "controller", "--config", str(config), *keys]
    ended = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if ended.returncode != 0:
        lines = ended.stdout.strip().splitlines() or ["no message"]
        raise RuntimeError(next((line for line in lines if line.startswith("error: ")), lines[-1]))
    return read_metrics(folder / METRICS_FILE)


def _digest(folder: Path) -> Mapping[str, str]:
    digests: Mapping[str, str] = json.loads((folder / "summary.json").read_text())["weights_sha256"]
    return digests
