"""python -m benchmarks.checkpointing: CPU time and memory of a gradient with each kind of gradient checkpointing.

A model of random weights in fp32, as actor, on one rank with one thread: the gradient of one row of --tokens tokens.
The kinds take turns, in processes of their own. Time is CPU time, memory the peak of anonymous memory (RssAnon) above
what the engine keeps; freed tensors are given back at once.
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
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.loading import Peak, anonymous_mib
from benchmarks.long_rows import MODEL, make_row
from benchmarks.memory import CPU, GIVE_BACK, save_model, silent
from services.actor.losses.actor_loss import actor_loss
from services.engine.model.forward import policy_forward
from services.engine.train_engine import TrainEngine
from splitppo.config import ActorConfig

KINDS: dict[str, Any] = {"none": False, "full": True, "selective": "selective"}


def main() -> None:
    """Prints the median CPU seconds and MiB of each kind, and their ratios to full checkpointing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--one", nargs=2, metavar=("FOLDER", "KIND"), help=argparse.SUPPRESS)
    parser.add_argument("--tokens", type=int, default=2048, help="of the row")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    if options.one:
        measure(options.one[0], options.one[1], options.tokens)
        return
    found: dict[str, list[tuple[float, float]]] = defaultdict(list)
    with tempfile.TemporaryDirectory("-checkpointing") as folder:
        save_model(Path(folder), MODEL)
        environment = os.environ | GIVE_BACK | {"OMP_NUM_THREADS": "1"}
        for _ in range(options.rounds):
            for kind in KINDS:
                command = [sys.executable, "-m", "benchmarks.checkpointing", "--one", folder, kind]
                command += ["--tokens", str(options.tokens)]
                done = subprocess.run(command, check=True, env=environment, stdout=subprocess.PIPE, text=True)
                found[kind].append(tuple(json.loads(done.stdout.splitlines()[-1])))
    medians = {kind: [statistics.median(column) for column in zip(*of, strict=True)] for kind, of in found.items()}
    for kind, (seconds, mib) in medians.items():
        ratios = [one / full for one, full in zip((seconds, mib), medians["full"], strict=True)]
        print(f"{kind:10} {seconds:6.2f} s ({ratios[0]:.2f} of full)  {mib:6.0f} MiB ({ratios[1]:.2f})")


def measure(folder: str, kind: str, num_tokens: int) -> None:
    """Prints CPU seconds of a gradient and MiB of its peak, as JSON."""
    torch.set_num_threads(1)
    keys = {"model": folder, "gradient_checkpointing": KINDS[kind], "ppo_max_token_len_per_gpu": num_tokens}
    config = ActorConfig.model_validate(keys)
    engine = TrainEngine(config, kind="policy", seed=0, max_response_length=num_tokens // 2, device=CPU)
    forward = policy_forward(1.0)
    loss = actor_loss(config)
    batch = make_row(num_tokens)
    engine.update(batch, forward, loss, progress=silent)
    [mini_batch] = engine.plan_update(batch)
    before = anonymous_mib()
    peak = Peak()
    begun_s = time.process_time()
    engine.accumulate_gradients(batch, mini_batch, forward, loss)
    seconds = time.process_time() - begun_s
    print(json.dumps([seconds, peak.stop() - before]))


if __name__ == "__main__":
    main()
