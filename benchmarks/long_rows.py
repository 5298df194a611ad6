"""python -m benchmarks.long_rows: the memory that one long row takes on 1, 2 and 4 ranks that divide its positions.

A model of random weights in fp32, as actor: the gradient of one row of --tokens tokens, in a process per rank. It is
anonymous memory (RssAnon) at its peak, above what the rank keeps between updates, next to what `python -m controller
--check` estimates. Freed tensors are given back at once.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.loading import Peak, anonymous_mib
from benchmarks.memory import CPU, GIVE_BACK, MODELS, save_model, silent
from controller.memory.estimate import estimate_group
from controller.models.shape import read_model_shape
from services.actor.losses.actor_loss import actor_loss
from services.engine.model.forward import policy_forward
from services.engine.train_engine import TrainEngine
from splitppo.batch import Batch
from splitppo.config import Config
from splitppo.config.load import validate

SIZES = (1, 2, 4)
GOALS = {2: 0.6, 4: 0.35}
MODEL = "long"
MODELS[MODEL] = ((512, 1408, 4, 8, 2, 2_000, True), 1)


def main() -> None:
    """Prints peaks and estimates in MiB, and their ratios; exit status 1 if a peak misses its goal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--one", nargs=2, metavar=("FOLDER", "TOGETHER"), help=argparse.SUPPRESS)
    parser.add_argument("--tokens", type=int, default=8192, help="of the row")
    options = parser.parse_args()
    if options.one:
        measure(options.one[0], int(options.one[1]), options.tokens)
        return
    peaks: dict[int, float] = {}
    with tempfile.TemporaryDirectory("-long-rows") as folder:
        save_model(Path(folder), MODEL)
        for together in SIZES:
            torchrun = ("-m", "services.runtime.group.torchrun", "--nproc-per-node", str(together))
            command = [sys.executable, *torchrun, "-m", "benchmarks.long_rows", "--one", folder, str(together)]
            environment = os.environ | GIVE_BACK | {"OMP_NUM_THREADS": "1"}
            subprocess.run([*command, f"--tokens={options.tokens}"], check=True, env=environment)
            found = [json.loads((Path(folder) / f"rank_{rank}.json").read_text()) for rank in range(together)]
            peak, estimate = (max(of[name] for of in found) for name in ("peak", "estimate"))
            peaks[together] = peak
            print(
                f"{together} ranks: {peak:6.0f} MiB, {peak / peaks[1]:.2f} of one rank; estimate {estimate:6.0f} MiB,"
                f" {estimate / peak:.2f}",
                flush=True,
            )
    sys.exit(any(peaks[together] > goal * peaks[1] for together, goal in GOALS.items()))


def make_config(folder: str, together: int, num_tokens: int) -> Config:
    """Returns the configuration of a run with one row in each step."""
    trained = {"model": folder, "lr": 1e-4, "ppo_max_token_len_per_gpu": num_tokens // together}
    tree = {
        "run": {"dir": folder, "total_steps": 1},
        "data": {"train_files": "none", "train_batch_size": 1},
        "actor": trained | {"ulysses_sequence_parallel_size": together},
        "critic": {"model": folder, "lr": 1e-4},
        "services": {"actor": {"num_processes": together}},
    }
    half = {"max_prompt_length": num_tokens // 2, "max_response_length": num_tokens // 2}
    return validate({**tree, "data": {**tree["data"], **half}}, "benchmark")


def measure(folder: str, together: int, num_tokens: int) -> None:
    """Writes the peak of this rank, in MiB, and the estimate of what a backward pass adds to weights and moments."""
    dist.init_process_group("gloo")
    config = make_config(folder, together, num_tokens)
    terms = estimate_group(config, "actor", read_model_shape(folder, "policy", "actor")).phases["backward"]
    engine = TrainEngine(
        config.actor, kind="policy", seed=0, max_response_length=config.data.max_response_length, device=CPU
    )
    forward = policy_forward(1.0)
    loss = actor_loss(config.actor)
    engine.update(make_row(64), forward, loss, progress=silent)  # moments, and what libraries keep
    batch = make_row(num_tokens)
    [mini_batch] = engine.plan_update(batch)
    before = anonymous_mib()
    peak = Peak()
    engine.accumulate_gradients(batch, mini_batch, forward, loss)
    found = {"peak": peak.stop() - before}
    found["estimate"] = (terms.total - terms.weights - terms.optimizer - terms.process) / 2**20
    (Path(folder) / f"rank_{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()


def make_row(num_tokens: int) -> Batch:
    """Returns one row, half of it a response, all of whose tokens count."""
    rng = np.random.default_rng(0)
    half = num_tokens // 2
    columns: dict[str, Any] = {name: [rng.normal(size=half)] for name in ("advantages", "old_log_probs")}
    tokens = {name: [rng.integers(3, 2_000, half)] for name in ("prompts", "responses")}
    return Batch.from_rows(**tokens, **columns)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
