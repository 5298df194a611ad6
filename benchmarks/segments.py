"""python -m benchmarks.segments: the memory that an update takes for an episode of several contexts, and for its parts.

A model of random weights in fp32, as actor, on one rank: an update of one episode whose --contexts contexts have
--tokens tokens each, an update of as many rows of one such context, and one of a row with all the tokens in a single
context. Micro-batches have --tokens tokens, or one row. Peaks are of anonymous memory (RssAnon), above what the rank
keeps between updates, each in a process of its own. Freed tensors are given back at once.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from benchmarks.loading import Peak, anonymous_mib
from benchmarks.long_rows import MODEL
from benchmarks.memory import CPU, GIVE_BACK, save_model, silent
from services.actor.losses.actor_loss import actor_loss
from services.engine.model.forward import policy_forward
from services.engine.train_engine import TrainEngine
from splitppo.batch import Batch
from splitppo.config import ActorConfig

GOAL = 1.15
CASES = ("rows", "episode", "one context")


def main() -> None:
    """Prints the peak and the time of each update; exit status 1 if the episode's peak misses its goal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--one", nargs=2, metavar=("FOLDER", "CASE"), help=argparse.SUPPRESS)
    parser.add_argument("--contexts", type=int, default=5, help="of the episode")
    parser.add_argument("--tokens", type=int, default=2048, help="of each context, with what follows it")
    options = parser.parse_args()
    if options.one:
        measure(*options.one, options.contexts, options.tokens)
        return
    peaks: dict[str, float] = {}
    with tempfile.TemporaryDirectory("-segments") as folder:
        save_model(Path(folder), MODEL)
        for case in CASES:
            command = [sys.executable, "-m", "benchmarks.segments", "--one", folder, case]
            command += [f"--contexts={options.contexts}", f"--tokens={options.tokens}"]
            environment = os.environ | GIVE_BACK | {"OMP_NUM_THREADS": "1"}
            said = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment).stdout
            peak, seconds = map(float, said.split())
            peaks[case] = peak
            print(f"{case:12s} {peak:6.0f} MiB, {peak / peaks['rows']:.2f} of rows; {seconds:5.1f} s", flush=True)
    sys.exit(peaks["episode"] > GOAL * peaks["rows"])


def measure(folder: str, case: str, num_contexts: int, num_tokens: int) -> None:
    """Prints the peak of an update, in MiB, and its seconds."""
    torch.set_num_threads(1)
    config = ActorConfig.model_validate({"model": folder, "lr": 1e-4, "ppo_max_token_len_per_gpu": num_tokens})
    engine = TrainEngine(config, kind="policy", seed=0, max_response_length=num_contexts * num_tokens, device=CPU)
    forward = policy_forward(1.0)
    loss = actor_loss(config)
    engine.update(make_rows("rows", 1, 64), forward, loss, progress=silent)  # moments, and what libraries keep
    batch = make_rows(case, num_contexts, num_tokens)
    before = anonymous_mib()
    peak = Peak()
    began_s = time.perf_counter()
    engine.update(batch, forward, loss, progress=silent)
    print(peak.stop() - before, time.perf_counter() - began_s)


def make_rows(case: str, num_contexts: int, num_tokens: int) -> Batch:
    """Makes the rows of a case: half of each context's tokens are sampled, and count."""
    rng = np.random.default_rng(0)
    half = num_tokens // 2
    num_rows = num_contexts if case == "rows" else 1
    length = half if case == "rows" else num_contexts * num_tokens - half
    is_sampled = np.arange(length) % num_tokens < half
    batch = Batch.from_rows(
        prompts=rng.integers(3, 2_000, (num_rows, half)),
        responses=rng.integers(3, 2_000, (num_rows, length)),
        response_mask=[is_sampled] * num_rows,
        advantages=rng.normal(size=(num_rows, length)),
        old_log_probs=rng.normal(-7.0, 0.1, (num_rows, length)),
    )
    if case != "episode":
        return batch
    starts = np.arange(half, length, num_tokens)
    later = np.stack([starts, np.full_like(starts, half)], axis=1).reshape(-1)
    return batch.merge(Batch.from_rows(segments=[later]))


if __name__ == "__main__":
    main()
