"""Tokens per second of the rollout backends beside Hugging Face's `generate`, on one thread.

    python -m benchmarks.rollout [--rounds 5] [--rows 64] [--tokens 128] [--hidden 384] [--layers 4] [--json FILE]

A random Qwen2 in fp32 samples at temperature 1, in rows of one batch: to a fixed length, and to varied lengths (one
token in fifty is a stop token). The engines are built as the actor builds them, over one policy, and take turns within
each round; only `generate` is timed, on new prompts in each round, and only tokens up to the stop token count. Figures
are medians, "vs generate" is the median of the ratios within the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.utils import logging as hf_logging

from services.engine.train_engine import TrainEngine
from services.rollout.backends import BACKENDS
from services.rollout.protocol import RolloutBackend, Sampling
from services.rollout.stopping import load_stop_rule
from services.runtime.context import RankContext
from splitppo.batch import Batch
from splitppo.config import Config
from splitppo.config.load import validate

GENERATE = "generate"  # Hugging Face's own
VOCABULARY = 4096
PAD = 0
NUM_STOP_TOKENS = 82
HEAD_DIM = 64
NUM_KV_HEADS = 2
PROMPT_TOKENS = (16, 48)
HAS_VLLM = find_spec("vllm") is not None


@dataclass(frozen=True)
class Setting:
    """The settings of one measurement.

    Attributes:
        tokens: maximal length of a response.
        is_varied: True if there are stop tokens.
    """

    rounds: int
    rows: int
    tokens: int
    hidden: int
    layers: int
    is_varied: bool = False


@dataclass(frozen=True)
class Measured:
    """The rounds of one engine: tokens that count, and the seconds they took."""

    tokens: Sequence[int]
    seconds: Sequence[float]

    @property
    def tokens_per_second(self) -> list[float]:
        return [tokens / seconds for tokens, seconds in zip(self.tokens, self.seconds, strict=True)]


Generate = Callable[[Batch, Sampling], Sequence[int]]  # gives the length of each response


def measure(setting: Setting) -> dict[str, Measured]:
    """Measures all engines that are installed, by name.

    The function has a process of its own, because vLLM cannot be built twice in one process.
    """
    torch.set_num_threads(1)
    hf_logging.disable_progress_bar()
    join_group_of_one()
    with tempfile.TemporaryDirectory() as folder:
        config = make_config(Path(folder), save_model(Path(folder), setting), setting)
        engines = build_engines(config, setting)
        sampling = Sampling(temperature=1.0, top_p=1.0, top_k=0, max_response_length=setting.tokens)
        rng = np.random.default_rng(0)
        results: dict[str, tuple[list[int], list[float]]] = {name: ([], []) for name in engines}
        for turn in range(setting.rounds + 1):
            rows = random_rows(rng, setting.rows)
            for name, generate in engines.items():
                start = time.perf_counter()
                lengths = generate(rows, sampling)
                seconds = time.perf_counter() - start
                if turn > 0:  # the first one warms up
                    results[name][0].append(int(sum(lengths)))
                    results[name][1].append(seconds)
    return {name: Measured(*columns) for name, columns in results.items()}


def build_engines(config: Config, setting: Setting) -> dict[str, Generate]:
    """Returns every engine over the same policy, built as the actor builds it."""
    device = torch.device("cpu")
    policy = TrainEngine(
        config.actor, kind="policy", seed=0, max_response_length=config.data.max_response_length, device=device
    )
    engines = {GENERATE: generate_of_hugging_face(policy, stop_tokens(setting))}
    for name in ("hf", "vllm") if HAS_VLLM else ("hf",):
        rollout = config.rollout.model_copy(update={"backend": name})
        context = RankContext(
            role_name="actor",
            rank=0,
            world_size=1,
            device=device,
            control_group=dist.group.WORLD,  # type: ignore[arg-type]
            config=config.model_copy(update={"rollout": rollout}),
        )
        backend = BACKENDS[name].build(context, policy, load_stop_rule(policy.model, context.config))
        backend.sync_weights(0)
        engines[name] = generate_of(backend)
    return engines


def generate_of_hugging_face(policy: TrainEngine, stop: Sequence[int]) -> Generate:
    """Returns a function that calls `model.generate` on the left-padded batch."""

    @torch.no_grad()
    def generate(rows: Batch, sampling: Sampling) -> list[int]:
        mask = np.fliplr(rows["prompts"].mask())
        ids = np.full(mask.shape, PAD, np.int64)
        width = mask.shape[1]
        ids[mask] = rows["prompts"].values
        with policy.gathered() as model:
            output = model.generate(
                torch.from_numpy(ids),
                attention_mask=torch.from_numpy(mask.astype(np.int64)),
                do_sample=True,
                temperature=sampling.temperature,
                top_k=0,
                top_p=1.0,
                max_new_tokens=sampling.max_response_length,
                eos_token_id=list(stop) or None,
                pad_token_id=PAD,
                use_cache=True,
            )
        ends = np.isin(output[:, width:].numpy(), stop)
        return np.where(ends.any(1), ends.argmax(1) + 1, ends.shape[1]).tolist()

    return generate


def generate_of(backend: RolloutBackend) -> Generate:
    """Returns a function that generates with one of our engines."""

    def generate(rows: Batch, sampling: Sampling) -> list[int]:
        steps = backend.generate(rows, sampling, lambda: False)
        return [len(response.tokens) for step in steps for response in step.ended]

    return generate


def random_rows(rng: np.random.Generator, num_rows: int) -> Batch:
    """Returns rows that ask for one response each to prompts of varied lengths."""
    lengths = rng.integers(*PROMPT_TOKENS, num_rows, endpoint=True)
    return Batch.from_rows(
        prompts=[rng.integers(NUM_STOP_TOKENS + 1, VOCABULARY, length) for length in lengths],
        seeds=list(rng.integers(-(2**63), 2**63 - 1, (num_rows, 1))),
    )


def stop_tokens(setting: Setting) -> list[int]:
    """Returns the stop tokens: a random model gives all tokens about the same probability."""
    return list(range(1, NUM_STOP_TOKENS + 1)) if setting.is_varied else []


def save_model(folder: Path, setting: Setting) -> Path:
    """Writes the random model; it needs no tokenizer."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=setting.hidden,
        intermediate_size=3 * setting.hidden,
        num_hidden_layers=setting.layers,
        num_attention_heads=setting.hidden // HEAD_DIM,
        num_key_value_heads=NUM_KV_HEADS,
        max_position_embeddings=PROMPT_TOKENS[1] + setting.tokens,
        pad_token_id=PAD,
        bos_token_id=None,
        eos_token_id=stop_tokens(setting) or None,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder / "model")
    return folder / "model"


def make_config(folder: Path, model: Path, setting: Setting) -> Config:
    """Returns the configuration of the run that the actor would belong to."""
    return validate(
        {
            "run": {"dir": str(folder), "total_steps": 1},
            "data": {
                "train_files": "unused",
                "train_batch_size": setting.rows,
                "max_prompt_length": PROMPT_TOKENS[1],
                "max_response_length": setting.tokens,
            },
            "rollout": {"max_batch_size": setting.rows, "vllm": {"max_num_seqs": setting.rows}},
            "actor": {"model": str(model), "lr": 0.0},
            "critic": {"lr": 0.0},
        },
        "benchmark",
    )


def join_group_of_one() -> None:
    """Joins the process group that vLLM looks for, as torchrun's environment describes it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    here = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in here.items()})
    dist.init_process_group("gloo")


def table(results: Mapping[str, Mapping[str, Measured]]) -> str:
    """Returns a Markdown table; the outer keys are the kinds of lengths."""
    lines = ["| lengths | engine | rounds | tokens | s | tokens/s | vs generate |", "|---|---|---|---|---|---|---|"]
    for lengths, engines in results.items():
        for name, measured in engines.items():
            ours = measured.tokens_per_second
            theirs = engines[GENERATE].tokens_per_second
            ratio = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
            lines.append(
                f"| {lengths} | {name} | {len(ours)} | {statistics.median(measured.tokens):.0f}"
                f" | {statistics.median(measured.seconds):.2f} | {statistics.median(ours):.0f} | {ratio:.2f} |"
            )
    return "\n".join(lines)


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, default=64, help="responses, all decoded together")
    parser.add_argument("--tokens", type=int, default=128, help="maximal tokens of a response")
    parser.add_argument("--hidden", type=int, default=384, help="width of the model, a multiple of 128")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every round there")
    arguments = vars(parser.parse_args())
    json_file = arguments.pop("json")
    setting = Setting(**arguments)
    if setting.hidden % (HEAD_DIM * NUM_KV_HEADS):
        parser.error(f"--hidden must be a multiple of {HEAD_DIM * NUM_KV_HEADS}, got {setting.hidden}")

    os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is loaded in the new processes
    results = {}
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), max_tasks_per_child=1) as processes:
        for name, is_varied in (("fixed", False), ("varied", True)):
            results[name] = processes.submit(measure, replace(setting, is_varied=is_varied)).result()
    print(table(results))
    if not HAS_VLLM:
        print("\nvLLM is not installed, so it is not in the table.")
    if json_file:
        rounds = {name: {engine: asdict(rows) for engine, rows in engines.items()} for name, engines in results.items()}
        json_file.write_text(json.dumps({"setting": arguments, "results": rounds}, indent=2) + "\n")


if __name__ == "__main__":
    main()
