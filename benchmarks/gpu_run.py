"""Cases of benchmarks.gpu_proof that make PPO runs by the real controller, with both groups on one device."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from benchmarks.gpu_engine import MODES, NOT_ON_A_CPU, Place, Values, drop_engine, model_folder
from benchmarks.overlap import Row, median
from recipes.rows import write_parquet
from recipes.sort_letters import task
from splitppo.run_folder.step_file import METRICS_FILE, read_metrics
from splitppo.run_folder.trace import TRACE_FILE, read_trace

ROOT = Path(__file__).resolve().parents[1]
_KILLED_AT = "critic.update.begin"
_LOG_CHARACTERS = 3000


def killed_critic(place: Place, *, size: str, mode: str) -> Values:
    """Makes a run of three steps, in the second of which the critic is killed; it goes on from a checkpoint."""
    config = _prepared(place, size, mode, save_freq=1)
    folder = place.folder / "killed"
    rows = _finished(config, folder, 3, _kill_in_step(2))
    values = {
        "steps": len(rows),
        **_figures(rows[1:]),
        "restarts": int(rows[-1]["recovery/num_restarts"]),
        "from a kill to the next call s": _recovery_s(folder),
    }
    shutil.rmtree(folder)
    return values


def resumed_run(place: Place, *, size: str, mode: str) -> Values:
    """Makes a run, and again with a stop half-way and a critic that is killed after it; compares their weights."""
    num_steps = 2 if place.tiny else 6
    half = num_steps // 2
    config = _prepared(place, size, mode, save_freq=half)
    whole = place.folder / "whole"
    broken = place.folder / "broken"
    rows = _finished(config, whole, num_steps)
    digest = _digest(whole)
    shutil.rmtree(whole)  # its checkpoints
    if not place.tiny:  # each start takes seconds
        _finished(config, broken, half)
    _finished(config, broken, num_steps, _kill_in_step(half + 1))
    values = {
        "steps": len(rows),
        **_figures(rows[1:]),
        "from a kill to the next call s": _recovery_s(broken),
        "same weights": _digest(broken) == digest,
    }
    shutil.rmtree(broken)
    if not values["same weights"]:
        values["failed"] = "the run with a stop and a kill ended with other weights than the run without"
    return values


def _prepared(place: Place, size: str, mode: str, *, save_freq: int) -> Path:
    """Makes model and data, and writes the configuration of a run; returns its file."""
    drop_engine()
    inputs = place.folder / "inputs"
    write_parquet(task.rows_of(task.split_words(0).train, "train"), inputs / "train.parquet")
    config = inputs / "run.yaml"
    config.write_text(yaml.safe_dump(_tree(place, str(model_folder(place, size)), mode, save_freq=save_freq)))
    return config


def _kill_in_step(step: int) -> str:
    return f"debug.failpoints={{{_KILLED_AT}: {{step: {step}, action: kill}}}}"


def _recovery_s(folder: Path) -> float:
    """Returns the seconds from the kill of the critic to the next call that it answered."""
    [mark] = (folder / "failpoints").glob("*.fired")
    killed_s = json.loads(mark.read_text())["unix_s"]
    calls_s = [span.started_s for span in read_trace(folder / TRACE_FILE) if span.pool == "critic"]
    return float(min(began_s for began_s in calls_s if began_s > killed_s) - killed_s)


def _figures(rows: Sequence[Row]) -> Values:
    return {
        **{f"{name} s": median(rows, f"timing_s/{name}") for name in ("step", "gen", "update_actor", "update_critic")},
        "sampler - trainer, mean nats": median(rows, "training/rollout_log_probs_diff_mean"),
        "max nats": max(row["training/rollout_log_probs_diff_max"] for row in rows),
        "actor's peak GiB": rows[-1].get("perf/max_memory_allocated_gb", NOT_ON_A_CPU),
    }


def _tree(place: Place, model: str, mode: str, *, save_freq: int) -> dict[str, Any]:
    device = {"devices": [0]} if place.device.type == "cuda" else {}
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
    code, said = said_by(command, {})
    if code != 0:
        for log in sorted((folder / "logs").glob("*.log")):
            print(f"--- {log.name}", log.read_text(errors="replace")[-_LOG_CHARACTERS:], sep="\n", file=sys.stderr)
        lines = said.strip().splitlines() or ["no message"]
        raise RuntimeError(next((line for line in lines if line.startswith("error: ")), lines[-1]))
    return read_metrics(folder / METRICS_FILE)


def said_by(command: Sequence[str], environment: Mapping[str, str]) -> tuple[int, str]:
    """Runs a command in the project's folder; returns its exit status, and what it printed, which also goes to stderr.

    stderr gets each piece at once, so that it shows how far a command came that hangs.
    """
    pipes: dict[str, Any] = {
        "stdin": subprocess.DEVNULL,  # the cases come on that of this process
        "stdout": subprocess.PIPE,
        "stderr": subprocess.STDOUT,
    }
    said = b""
    with subprocess.Popen(command, cwd=ROOT, env=os.environ | dict(environment), **pipes) as process:
        while piece := process.stdout.read1():
            sys.stderr.buffer.write(piece)
            sys.stderr.flush()
            said += piece
    return process.returncode, said.decode(errors="replace")


def _digest(folder: Path) -> Mapping[str, str]:
    digests: Mapping[str, str] = json.loads((folder / "summary.json").read_text())["weights_sha256"]
    return digests
