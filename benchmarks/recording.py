"""python -m benchmarks.recording: what the record of a run (rollouts, events, live.json) costs a step.

Whole runs take turns, with and without rollouts, every second pair the other way round: the quickstart (256 responses
of about 11 tokens), and random models of 3.3 million parameters with 64 responses of 313 tokens, all of which are
recorded token by token. CPU seconds are those of the thread that records, which writes them into events.jsonl; they
include the import of pyarrow. The wall difference is that of the medians of a pair's steps; its interval is a bootstrap
over pairs.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.forced_lengths import make_configs, make_inputs
from recipes.sort_letters.prepare import prepare
from splitppo.run_folder.events import read_events
from splitppo.run_folder.step_file import METRICS_FILE, read_metrics

SHAPE = {"hidden_size": 256, "intermediate_size": 800, "num_hidden_layers": 4, "num_key_value_heads": 4}
NUM_TOKENS = 313  # per response: 20,032 per step
QUICKSTART = "recipes/sort_letters/cpu.yaml"
TIMEOUT_S = 900.0


def main() -> None:
    """Prints a row per kind of run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5, help="runs with and without the record, of each kind")
    options = parser.parse_args()
    prepare()
    with tempfile.TemporaryDirectory("-recording") as name:
        folder = Path(name)
        make_inputs(folder, **SHAPE, max_position_embeddings=512)
        make_configs(folder, (), {"kind": "uniform", "low": NUM_TOKENS, "high": NUM_TOKENS}, NUM_TOKENS, {})
        print(
            f"{'':24s}{'step, s':>9s}{'CPU of the record, ms a step':>31s}"
            f"{'share':>8s}{'wall difference, ms a step':>40s}"
        )
        large = ("20,032 tokens, 3.3 M", str(folder / "config.yaml"), 5)
        for kind, config, num_steps in (("quickstart", QUICKSTART, 12), large):
            pairs = [
                pair_of(config, folder / f"{num_steps}_{number}", num_steps, first=number % 2 == 0)
                for number in range(options.pairs)
            ]
            print(row_of(kind, pairs, num_steps), flush=True)


def pair_of(config: str, run_dir: Path, num_steps: int, *, first: bool) -> list[tuple[float, float]]:
    """Returns what `run` does with and without the record; `first` is that of the two which runs first."""
    found = {on: run(config, run_dir / str(on), num_steps, on) for on in (first, not first)}
    return [found[True], found[False]]


def run(config: str, run_dir: Path, num_steps: int, on: bool) -> tuple[float, float]:
    """Returns the median seconds of a step, without the first two, and the CPU seconds of the record."""
    overrides = (f"run.dir={run_dir}", f"run.total_steps={num_steps}", "evaluation.min_accuracy=0")
    command = [sys.executable, "-m", "controller", "--config", config, *overrides]
    command.append(f"tracking.rollouts.enable={str(on).lower()}")
    subprocess.run(command, check=True, capture_output=True, timeout=TIMEOUT_S)
    seconds = [row["timing_s/step"] for row in read_metrics(run_dir / METRICS_FILE) if row["step"] > 2]
    [end] = [row for row in read_events(run_dir) if row["kind"] == "end"]
    return statistics.median(seconds), end["record_cpu_s"]


def row_of(kind: str, pairs: Sequence[Sequence[tuple[float, float]]], num_steps: int) -> str:
    """Returns the row of one kind of run."""
    step_s = statistics.median(without for _, (without, _) in pairs)
    cpu_s = statistics.median(cpu for (_, cpu), _ in pairs) / num_steps
    differences = np.array([with_record - without for (with_record, _), (without, _) in pairs]) * 1e3
    draws = np.random.default_rng(0).choice(differences, (2000, len(differences))).mean(axis=1)
    low, high = np.quantile(draws, (0.025, 0.975))
    wall = f"{differences.mean():+.0f} ({low:+.0f} to {high:+.0f})"
    return f"{kind:24s}{step_s:9.2f}{cpu_s * 1e3:31.1f}{cpu_s / step_s:8.2%}{wall:>40s}"


if __name__ == "__main__":
    main()
