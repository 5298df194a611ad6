"""python -m benchmarks.exchange: how fast a policy's weights are published as files, verified, and loaded again.

One process, with one compute thread, does what rank 0 of an actor and of a rollout group do, with random weights of
three sizes in fp32, in turn on the disk of the run folder and in main memory. Figures are medians of the rounds. *copy*
is a copy of the weights from memory to memory in the same round, the machine's own pace. *load* reads them without
verification; *verify* is what a load with verification takes longer.

At last two ranks publish the same weights to storage that is slow: each write of a weight waits. If the ranks write at
the same time, publishing takes as long as the writes of one rank.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from transformers import Qwen2Config, Qwen2ForCausalLM

from services.engine import exchange as files
from services.engine.exchange import PublishedWeights, Publisher

# (hidden size, size inside the MLP, layers, vocabulary), by the name of the size.
SIZES = {
    "13 MB": (256, 1024, 3, 200),
    "128 MB": (512, 1536, 9, 3_000),
    "1 GiB": (1024, 4096, 15, 16_000),
}
RUN = "benchmark"
FP32 = torch.float32
NUM_RANKS = 2
SLOW_WRITE_S = 0.04


def main() -> None:
    """Prints a line for each size and folder: the pace of each part, and the share of verification."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folders", nargs="+", type=Path, default=[Path("runs"), Path("/dev/shm")])  # noqa: S108
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("weights  folder      GB/s: copy  publish   load   verify / (publish + load)   all / copy")
    for size in options.sizes:
        model = make_model(*SIZES[size])
        seconds: dict[Path, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        for number in range(options.rounds + 1):
            for parent in options.folders:
                for part, took_s in exchange(model, parent).items():
                    if number:  # the first round fills caches
                        seconds[parent][part].append(took_s)
        for parent, parts in seconds.items():
            medians = {part: statistics.median(took_s) for part, took_s in parts.items()}
            report(size, parent, 4 * model.num_parameters(), medians)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(publish_slowly, (folder, options.sizes[0]), nprocs=NUM_RANKS)  # type: ignore[no-untyped-call]


def report(size: str, parent: Path, num_bytes: int, medians: dict[str, float]) -> None:
    """Prints the line of one size and folder."""
    copied, published, loaded = (num_bytes / medians[part] / 1e9 for part in ("copy", "publish", "load"))
    share = (medians["verified load"] - medians["load"]) / (medians["publish"] + medians["load"])
    in_all = (medians["publish"] + medians["verified load"]) / medians["copy"]
    print(
        f"{size:9s}{parent!s:13s}{copied:9.2f}{published:9.2f}{loaded:7.2f}{share:28.2f}{in_all:13.1f}",
        flush=True,
    )


def make_model(hidden_size: int, intermediate_size: int, num_layers: int, vocab_size: int) -> Any:
    """Makes a Qwen2 model of random weights, with one key-value head for every two heads."""
    with torch.device("meta"):
        model = Qwen2ForCausalLM(
            Qwen2Config(
                hidden_size=hidden_size,
                intermediate_size=intermediate_size,
                num_hidden_layers=num_layers,
                vocab_size=vocab_size,
                num_attention_heads=8,
                num_key_value_heads=4,
                tie_word_embeddings=True,
            )
        )
    model = model.to_empty(device="cpu")
    model.tie_weights()
    for parameter in model.parameters():
        parameter.data.normal_(0.0, 0.02)
    return model


def exchange(model: Any, parent: Path) -> dict[str, float]:
    """Publishes, verifies and loads the weights in a new folder; returns the seconds of each part."""
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    copies = {name: torch.empty_like(weight) for name, weight in weights.items()}
    parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory("-exchange", dir=parent) as folder:
        publisher = Publisher(Path(folder), model, lambda _: iter(weights.items()), FP32, torch.device("cpu"))
        for name, weight in weights.items():  # their memory is there
            copies[name].copy_(weight)
        seconds = {"copy": timed(lambda: [copies[name].copy_(weight) for name, weight in weights.items()])}
        digests: list[str] = []
        seconds["publish"] = timed(lambda: digests.append(publisher.publish(RUN, 0, 0, lambda *_: None)))

        def load(*, verified: bool) -> None:
            published = PublishedWeights.open(Path(folder), 0, digests[0])
            published.check(RUN, model, FP32)
            if verified:
                published.verify()
            for name, weight in published.weights():
                copies[name].copy_(weight)

        seconds["load"] = timed(lambda: load(verified=False))
        seconds["verified load"] = timed(lambda: load(verified=True))
        assert all(torch.equal(copies[name], weight) for name, weight in weights.items())
    return seconds


def publish_slowly(rank: int, folder: str, size: str) -> None:
    """On a rank: publishes weights to slow storage; rank 0 prints the seconds of publishing and of its writes."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder) / "store"), NUM_RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=NUM_RANKS)
    model = make_model(*SIZES[size])
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    num_written = 0
    digest_of = files.xxhash.xxh3_128_hexdigest

    def slow_digest(values: memoryview) -> str:
        nonlocal num_written
        num_written += 1
        time.sleep(SLOW_WRITE_S)
        return digest_of(values)

    def gathered(_: torch.dtype) -> Any:
        for named in weights.items():
            dist.barrier()  # all ranks gather each weight together
            yield named

    files.xxhash.xxh3_128_hexdigest = slow_digest
    publisher = Publisher(Path(folder) / "weights", model, gathered, FP32, torch.device("cpu"))
    dist.barrier()
    took_s = timed(lambda: publisher.publish(RUN, 0, 0, lambda *_: None))
    if rank == 0:
        own_s = num_written * SLOW_WRITE_S
        print(f"{NUM_RANKS} ranks, slow storage: published in {took_s:.2f} s; writes of one rank {own_s:.2f} s")
    dist.destroy_process_group()


def timed(work: Callable[[], object]) -> float:
    """Returns how many seconds something takes."""
    began_s = time.perf_counter()
    work()
    return time.perf_counter() - began_s


if __name__ == "__main__":
    main()
