"""python -m benchmarks.compile: the time of an update with and without compiled code (`actor.compile`).

Models of random weights, as actor, on one rank with one thread: an update of one mini-batch of packed rows. Of each
model and dtype a process has two engines, which take turns; time is CPU time, the median of the rounds. `start` is the
CPU time in which the engine with code starts, `again` that of a second process, which finds inductor's cache.
`gradient` and `log-probs` are the largest difference between the engines: of a gradient relative to its norm, of
log-probs in nats.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.memory import CPU, save_model, silent
from services.actor.losses.actor_loss import actor_loss
from services.engine import parallel
from services.engine.model.forward import policy_forward
from services.engine.train_engine import TrainEngine
from splitppo.batch import Batch
from splitppo.config import ActorConfig

# Of benchmarks.memory, and rows of an update.
MODELS = {"3M": 16, "28M": 6, "vocabulary": 4}
PROMPT = 64
RESPONSE = 192


def main() -> None:
    """Prints a line for each model and dtype."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--one", nargs=3, metavar=("FOLDER", "MODEL", "DTYPE"), help=argparse.SUPPRESS)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    if options.one:
        measure(*options.one, options.rounds)
        return
    columns = ("without s", "with s", "ratio", "start s", "again s", "gradient", "log-probs")
    print(f"{'model':12s}{'dtype':6s}" + "".join(f"{name:>11s}" for name in columns), flush=True)
    with tempfile.TemporaryDirectory("-compile") as scratch:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": f"{scratch}/cache"}
        for model in options.models:
            folder = Path(scratch) / model
            save_model(folder, model)
            for dtype in ("fp32", "bf16"):
                found = []
                for rounds in (options.rounds, 0):
                    command = [sys.executable, "-m", "benchmarks.compile", "--one", str(folder), model, dtype]
                    command += ["--rounds", str(rounds)]
                    done = subprocess.run(command, check=True, env=environment, stdout=subprocess.PIPE, text=True)
                    found.append(json.loads(done.stdout.splitlines()[-1]))
                first, again = found
                without_s, with_s = (statistics.median(first[name]) for name in ("without", "with"))
                times = [f"{without_s:.2f}", f"{with_s:.2f}", f"{with_s / without_s:.2f}"]
                starts = [f"{first['start']:.1f}", f"{again['start']:.1f}"]
                cells = [*times, *starts, f"{first['gradient']:.1g}", f"{first['log-probs']:.1g}"]
                print(f"{model:12s}{dtype:6s}" + "".join(f"{cell:>11s}" for cell in cells), flush=True)


def measure(folder: str, model: str, dtype: str, rounds: int) -> None:
    """Prints what one process has measured, as JSON."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    keys = {"model": folder, "dtype": dtype, "lr": 1e-5}
    config = ActorConfig.model_validate(keys)
    loss = actor_loss(config)
    forward = policy_forward(1.0)
    batch = make_batch(MODELS[model])
    found: dict[str, Any] = {"with": [], "without": []}
    begun_s = time.process_time()
    engines = {"with": make_engine(config.changed("", {"compile": True}))}
    found["start"] = time.process_time() - begun_s
    if rounds:
        engines["without"] = make_engine(config)
        found |= differences(engines, batch)
    for _ in range(rounds):
        for name, engine in engines.items():
            begun_s = time.process_time()
            engine.update(batch, forward, loss, progress=silent)
            found[name].append(time.process_time() - begun_s)
    print(json.dumps(found))


def make_engine(config: ActorConfig) -> TrainEngine:
    """Starts an engine with random weights."""
    return TrainEngine(config, kind="policy", seed=0, max_response_length=RESPONSE, device=CPU)


def make_batch(num_rows: int) -> Batch:
    """Returns rows of random tokens, of different lengths."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(RESPONSE // 2, RESPONSE + 1, num_rows)
    responses = [rng.integers(3, 2000, length) for length in lengths]
    return Batch.from_rows(
        prompts=[rng.integers(3, 2000, PROMPT) for _ in lengths],
        responses=responses,
        response_mask=[np.ones(length, np.uint8) for length in lengths],
        advantages=[rng.normal(size=length) for length in lengths],
        old_log_probs=[np.full(length, -8.0) for length in lengths],
    )


def differences(engines: dict[str, TrainEngine], batch: Batch) -> dict[str, float]:
    """Compares the engines before their first update."""
    forward = policy_forward(1.0)
    gradients = []
    log_probs = []
    for engine in engines.values():
        [mini_batch] = engine.plan_update(batch)
        engine.accumulate_gradients(batch, mini_batch, forward, actor_loss(engine.config))
        named = engine.model.named_parameters()
        gradients.append(torch.cat([parallel.full(weight.grad).flatten() for _, weight in named]))
        computed = engine.compute(batch, forward, outputs=("log_probs",), progress=silent)
        log_probs.append(computed["log_probs"].values)
    distance = torch.linalg.vector_norm(gradients[0] - gradients[1]) / torch.linalg.vector_norm(gradients[1])
    return {"gradient": float(distance), "log-probs": float(np.abs(log_probs[0] - log_probs[1]).max())}


if __name__ == "__main__":
    main()
