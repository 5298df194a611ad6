"""python -m benchmarks.loading: the memory that each of two ranks takes to load a policy of 0.5 B random weights.

*whole*: every rank reads the whole model with transformers, then keeps its shard. *shards*: each rank reads its own
rows, as the engine does. The figures are anonymous memory (RssAnon): the memory of mapped files is not counted, since
it can be dropped at any time.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from services.engine.model.forward import RESPONSE_METHOD
from services.engine.model.loading import build_model, fill_model
from services.engine.strategies.registry import build_strategy
from services.engine.weights_digest import weights_digest

NUM_RANKS = 2
# Qwen2.5-0.5B.
SIZES = {"vocab_size": 151_936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24}
HEADS = {"num_attention_heads": 14, "num_key_value_heads": 2, "tie_word_embeddings": True}
_POLL_INTERVAL_S = 0.005


def main() -> None:
    """Prints the peak and the final growth of each way in MiB per rank, and the ratio of the peaks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank-of", nargs=2, metavar=("WAY", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_of:
        load(*options.rank_of)
        return
    with tempfile.TemporaryDirectory("-loading") as folder:
        torch.manual_seed(0)
        with torch.device("meta"):
            model = Qwen2ForCausalLM(Qwen2Config(**SIZES, **HEADS))
        model = model.to_empty(device="cpu").bfloat16()
        for parameter in model.parameters():
            parameter.data.normal_(0.0, 0.02)
        model.tie_weights()
        model.save_pretrained(folder)
        del model
        peaks = {way: time_group(way, folder) for way in ("whole", "shards")}
    print(f"peak, shards / whole: {peaks['shards'] / peaks['whole']:.2f}")


def time_group(way: str, folder: str) -> float:
    """Returns the largest peak of a rank, in MiB; prints the lines of its ranks."""
    torchrun = (sys.executable, "-m", "services.runtime.group.torchrun", "--nproc-per-node", str(NUM_RANKS))
    said = subprocess.run(
        [*torchrun, "-m", "benchmarks.loading", "--rank-of", way, folder], check=True, stdout=subprocess.PIPE, text=True
    ).stdout
    print(said, end="")
    return max(float(line.split()[3]) for line in said.splitlines() if line.startswith(way))


def load(way: str, folder: str) -> None:
    """One rank: loads the policy, and prints by how much its memory has grown."""
    dist.init_process_group("gloo")
    before = anonymous_mib()
    peak = Peak()
    began = time.perf_counter()
    source: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) if way == "whole" else None
    model = build_model(folder, "policy")
    build_strategy(torch.device("cpu")).shard(model, bf16=False, forward_method=RESPONSE_METHOD)
    fill_model(model, folder, "policy")
    del source
    took_s = time.perf_counter() - began
    after = anonymous_mib() - before
    highest = peak.stop() - before
    digest = weights_digest(model)[:8]
    print(f"{way:8s}rank {dist.get_rank()} {highest:8.0f} MiB peak {after:8.0f} MiB kept {took_s:6.1f} s {digest}")
    sys.stdout.flush()
    dist.barrier()
    os._exit(0)


class Peak:
    """The highest anonymous memory since it was made."""

    def __init__(self) -> None:
        self._highest = 0.0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._ended.wait(_POLL_INTERVAL_S):
            self._highest = max(self._highest, anonymous_mib())

    def stop(self) -> float:
        self._ended.set()
        self._thread.join()
        return self._highest


def anonymous_mib() -> float:
    """Returns the anonymous memory of this process, in MiB."""
    status = Path("/proc/self/status").read_text()
    return float(next(line for line in status.splitlines() if line.startswith("RssAnon")).split()[1]) / 1024


if __name__ == "__main__":
    main()
