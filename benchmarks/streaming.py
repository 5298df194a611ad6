"""What streaming by completion buys where few responses are long: step times, measured in one run.

    python -m benchmarks.streaming [--reward-model] [--rounds 3] [--steps 3] [--parts 4 6] [--hidden 128] [--layers 4]

Random Qwen2 models, one thread per group, schedule overlap; response lengths are forced, log-normal (median 40, at most
512). Two pairs of groups are started, the frozen reference beside the policy in one and beside the critic in the other;
with --reward-model a model of the policy's size scores in the critic's group. Blocks of steps alternate between both
placements, unstreamed and in different numbers of parts; the first step of each block is left out. Learning rates are 0
and every step gets the same prompts and seeds, so all steps work on the same rollouts. Figures are medians, "least" the
shortest step: other work on the machine only adds time. Only ratios within one run mean anything on a shared machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
import uvloop
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2ForSequenceClassification

from benchmarks.overlap import Row, SamePrompts, median, run_block
from controller.data.prompts import load_prompts
from controller.data.reward_rows import load_reward_tokenizer
from controller.data.tokenizer import load_tokenizer
from controller.rollout.scoring import Scorer
from controller.run.folder import RunFolder
from controller.tracking.trackers import METRICS_FILE, read_metrics
from controller.workers.client import Caller
from controller.workers.concurrency import gather_calls
from controller.workers.worker_groups import WorkerGroups, Workers
from recipes.qwen2_tokenizer import save_tokenizer
from recipes.sort_letters.prepare import EOS, PAD, make_tokenizer
from rewards.manager import RewardManager
from splitppo.config import Config
from splitppo.config.load import validate

ROWS, PROMPT_TOKENS, MAX_RESPONSE = 64, 64, 512
LENGTHS = {"kind": "log_normal", "median": 40, "max": MAX_RESPONSE}
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return len(set(solution_str)) / 100
"""


class Variant(NamedTuple):
    """What a block of steps is run with."""

    reference: str
    num_parts: int

    def __str__(self) -> str:
        return f"reference: {self.reference}, " + (f"{self.num_parts} parts" if self.num_parts > 1 else "unstreamed")


class Running(NamedTuple):
    """A pair of groups, and the run folder that they were started from."""

    folder: RunFolder
    workers: Workers


def make_inputs(folder: Path, hidden: int, layers: int) -> None:
    """Random models, prompts of PROMPT_TOKENS characters, a reward function."""
    tokenizer = make_tokenizer()
    ids = {"pad_token_id": tokenizer.token_to_id(PAD), "eos_token_id": tokenizer.token_to_id(EOS)}
    shape = Qwen2Config(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        max_position_embeddings=2048,
        num_labels=1,
        **ids,
    )
    torch.manual_seed(0)
    for name, kind in (("policy", Qwen2ForCausalLM), ("reward", Qwen2ForSequenceClassification)):
        kind(shape).save_pretrained(folder / name)
        save_tokenizer(tokenizer, folder / name, named_tokens={"eos_token": EOS, "pad_token": PAD})
    rows = [
        {"prompt": f"{row:03d}" * (PROMPT_TOKENS // 3), "data_source": "any", "reward_model": {"ground_truth": ""}}
        for row in range(ROWS)
    ]
    (folder / "train.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (folder / "reward.py").write_text(REWARD)


def make_config(folder: Path, reference: str, *, reward_model: bool) -> Config:
    """The configuration of a pair of groups."""
    model = {"ppo_mini_batch_size": ROWS // 4, "lr": 0.0, "ppo_max_token_len_per_gpu": 2048, "use_remove_padding": True}
    tree: dict[str, Any] = {
        "run": {"dir": str(folder / f"reference_{reference}"), "total_steps": 1, "schedule": "overlap"},
        "data": {
            "train_files": str(folder / "train.jsonl"),
            "train_batch_size": ROWS,
            "max_prompt_length": PROMPT_TOKENS,
            "max_response_length": MAX_RESPONSE,
        },
        "algorithm": {"use_kl_in_reward": True},
        "actor": {"model": str(folder / "policy"), **model},
        "critic": model,
        "placement": {"reference": reference},
        "reward": {"custom_function_path": str(folder / "reward.py")},
        "evaluation": {"val_before_train": False},
        "tracking": {"trackers": []},
        "checkpoint": {"save_freq": -1, "save_last": False},
        "services": {role: {"threads": 1} for role in ("actor", "critic")},
        "debug": {"response_lengths": LENGTHS},
    }
    if reward_model:
        tree["reward_model"] = {"model": str(folder / "reward")}
    return validate(tree, "benchmark")


async def measure(folder: Path, options: argparse.Namespace) -> Mapping[Variant, Sequence[Row]]:
    """Runs all blocks; returns the metrics lines of each variant, without the first step of each block."""
    hosts = ("actor", "critic")
    configs = {host: make_config(folder, host, reward_model=options.reward_model) for host in hosts}
    config = configs["actor"]
    tokenizer = load_tokenizer(config.actor.model)
    table = load_prompts(config.data, tokenizer, "train")
    prompts = SamePrompts(table, ROWS, config.run.seed, shuffle=True)
    variants = [Variant(host, parts) for parts in (1, *options.parts) for host in hosts]
    rows: dict[Variant, list[Row]] = defaultdict(list)
    async with AsyncExitStack() as stack:
        running = {host: await start(stack, configs[host]) for host in hosts}
        manager = await stack.enter_async_context(RewardManager(config.reward, table.data_sources))
        encode = None
        if options.reward_model:
            encode = load_reward_tokenizer(config.reward_model, table, is_model_here=True)
        scorer = Scorer(tokenizer, manager, encode)
        for _ in range(options.rounds):
            for variant in variants:
                folder_of, workers = running[variant.reference]
                await gather_calls(*(client.load_checkpoint(0) for client in workers.clients))
                block = block_config(folder_of.config, variant, options.steps)
                await run_block(block, folder_of, workers, prompts, scorer)
                rows[variant] += (measured := read_metrics(block.run.dir / METRICS_FILE)[1:])
                print(f"{variant}: {median(measured, 'timing_s/step'):.2f} s", flush=True)
    return rows


async def start(stack: AsyncExitStack, config: Config) -> Running:
    """Starts a pair of groups, which the stack ends."""
    folder = stack.enter_context(RunFolder(config))
    caller = Caller(folder.lease.run_id, folder.lease.epoch, nonce=folder.lease.nonce)
    groups = WorkerGroups(folder.config, folder.config_file, caller, lambda *_: None)
    stack.push_async_callback(groups.close)
    return Running(folder, await groups.connect())


def block_config(config: Config, variant: Variant, num_steps: int) -> Config:
    """The configuration of a block."""
    run = config.run.model_copy(update={"total_steps": num_steps})
    rollout = config.rollout.model_copy(update={"stream_groups": variant.num_parts})
    return config.model_copy(update={"run": run, "rollout": rollout})


def report(rows: Mapping[Variant, Sequence[Row]]) -> str:
    """The table, and the best of each number of parts over the best unstreamed one."""
    names = ("step", "gen", "old_log_prob", "ref", "values", "reward_model", "update_actor", "update_critic")
    lines = ["seconds".ljust(36) + "".join(f"{name:>14}" for name in ("least", *names))]
    steps = {variant: median(found, "timing_s/step") for variant, found in rows.items()}
    least = {variant: min(row["timing_s/step"] for row in found) for variant, found in rows.items()}
    for variant, found in rows.items():
        seconds = [least[variant], *(median(found, f"timing_s/{name}") for name in names)]
        lines.append(str(variant).ljust(36) + "".join(f"{value:>14.2f}" for value in seconds))
    for title, seconds_of in (("medians", steps), ("least", least)):
        best = {
            parts: min((v for v in steps if v.num_parts == parts), key=seconds_of.__getitem__) for _, parts in steps
        }
        lines += [
            f"{title}: ({variant}) / ({best[1]}): {seconds_of[variant] / seconds_of[best[1]]:.2f}"
            for parts, variant in best.items()
            if parts > 1
        ]
    return "\n".join(lines)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reward-model", action="store_true", help="a reward model of the policy's size")
    parser.add_argument("--rounds", type=int, default=3, help="blocks per variant")
    parser.add_argument("--steps", type=int, default=3, help="steps per block; the first is left out")
    parser.add_argument("--parts", type=int, nargs="+", default=[4, 6], help="rollout.stream_groups where it streams")
    parser.add_argument("--hidden", type=int, default=128, help="of the models")
    parser.add_argument("--layers", type=int, default=4, help="of the models")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        make_inputs(Path(name), options.hidden, options.layers)
        rows = asyncio.Runner(loop_factory=uvloop.new_event_loop).run(measure(Path(name), options))
        print(report(rows))


if __name__ == "__main__":
    main()
