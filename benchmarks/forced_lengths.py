"""Runs blocks of steps in turn: random models, prompts, forced lengths of responses, sets of groups, variants.

Learning rates are 0, so with the same prompts and seeds every step works on the same rollouts.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2ForSequenceClassification

from benchmarks.overlap import Row, SamePrompts, run_block
from controller.data.prompts import load_prompts
from controller.data.reward_rows import load_reward_tokenizer
from controller.data.tokenizer import load_tokenizer
from controller.run.folder import RunFolder
from controller.scoring.scorer import Scorer
from controller.workers.clients import Caller
from controller.workers.concurrency import gather_calls
from controller.workers.worker_groups import WorkerGroups, Workers
from recipes.qwen2_tokenizer import save_tokenizer
from recipes.sort_letters.prepare import EOS, PAD, make_tokenizer
from rewards.manager import RewardManager
from splitppo.config import Config, Schedule, load_config
from splitppo.run_folder.spans import Span
from splitppo.run_folder.step_file import METRICS_FILE, read_metrics
from splitppo.run_folder.trace import TRACE_FILE, read_trace

ROWS = 64
PROMPT_TOKENS = 64
MINI_BATCHES = 4
REWARD = "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return 0.0\n"
CRITIC_FREE_ESTIMATOR = "reinforce_plus_plus"
# The keys of each set of worker groups that runs blocks.
GROUPS = {
    "reference: actor": ("placement.reference=actor",),
    "reference: critic": ("placement.reference=critic",),
    "both pools": (
        *("placement.reference=actor", "rollout.share=0.5", "services.actor.cpus=[0]", "services.critic.cpus=[1]"),
        *("services.rollout.threads=1", "services.rollout.cpus=[1]"),
    ),
    "actor on both cores": (
        *("placement.reference=actor", "services.actor.num_processes=2"),
        f"algorithm.adv_estimator={CRITIC_FREE_ESTIMATOR}",
    ),
}


class Variant(NamedTuple):
    """The settings that a block of steps is run with.

    Attributes:
        groups: a key of GROUPS, the worker groups that run the block.
        num_parts: `rollout.stream_groups`.
        has_critic: False for GRPO: no values, the KL of the same reference; the critic's group only waits.
        share: `rollout.share`.
    """

    groups: str
    num_parts: int = 1
    has_critic: bool = True
    share: float = 0.0
    schedule: Schedule = "overlap"

    def __str__(self) -> str:
        parts = f"{self.num_parts} parts" if self.num_parts > 1 else "unstreamed"
        share = f", share {self.share:g}" if self.groups == "both pools" else ""
        schedule = f", {self.schedule}" if self.schedule != "overlap" else ""
        return f"{self.groups}{share}, {parts}{schedule}" + ("" if self.has_critic else ", critic-free")


CRITIC_FREE = Variant("reference: actor", has_critic=False)


class Block(NamedTuple):
    """Some steps of a variant: their configuration, all lines of metrics, and the timeline."""

    config: Config
    lines: Sequence[Row]
    spans: Sequence[Span]

    @property
    def rows(self) -> Sequence[Row]:
        """The metrics of all steps but the first."""
        return self.lines[1:]


class Running(NamedTuple):
    """Worker groups, and the run folder that they were started from."""

    folder: RunFolder
    workers: Workers


def make_inputs(folder: Path, **shape: int) -> None:
    """Makes random Qwen2 models with heads of 64 (policy, reward), prompts of PROMPT_TOKENS characters, a reward
    function.
    """
    tokenizer = make_tokenizer()
    config = Qwen2Config(
        vocab_size=tokenizer.get_vocab_size(),
        num_attention_heads=shape["hidden_size"] // 64,
        num_labels=1,
        pad_token_id=tokenizer.token_to_id(PAD),
        eos_token_id=tokenizer.token_to_id(EOS),
        **shape,
    )
    torch.manual_seed(0)
    for name, kind in (("policy", Qwen2ForCausalLM), ("reward", Qwen2ForSequenceClassification)):
        kind(config).save_pretrained(folder / name)
        save_tokenizer(tokenizer, folder / name, named_tokens={"eos_token": EOS, "pad_token": PAD})
    prompts = [f"{row:04d}" * (PROMPT_TOKENS // 4) for row in range(ROWS)]
    rows = [{"prompt": prompt, "data_source": "any", "reward_model": {"ground_truth": ""}} for prompt in prompts]
    (folder / "train.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (folder / "reward.py").write_text(REWARD)


def make_configs(
    folder: Path, groups: Sequence[str], lengths: Mapping[str, Any], max_response: int, model: Mapping[str, Any]
) -> dict[str, Config]:
    """Returns the configuration of each set of groups: defaults, except for the sizes and `model` of both sections."""
    model = {"ppo_mini_batch_size": ROWS // MINI_BATCHES, "lr": 0.0, **model}
    tree: dict[str, Any] = {
        "run": {"dir": str(folder), "total_steps": 1, "schedule": "overlap"},
        "data": {
            "train_files": str(folder / "train.jsonl"),
            "train_batch_size": ROWS,
            "max_prompt_length": PROMPT_TOKENS,
            "max_response_length": max_response,
        },
        "algorithm": {"use_kl_in_reward": True},
        "actor": {"model": str(folder / "policy"), **model},
        "critic": model,
        "reward": {"custom_function_path": str(folder / "reward.py"), "num_workers": 1},
        "evaluation": {"val_before_train": False},
        "tracking": {"trackers": []},
        "checkpoint": {"save_freq": -1, "save_last": False},
        "services": {role: {"threads": 1} for role in ("actor", "critic")},
        "debug": {"response_lengths": lengths},
    }
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(tree))
    return configs_of(file, folder, groups)


def configs_of(file: Path, folder: Path, groups: Sequence[str], overrides: Sequence[str] = ()) -> dict[str, Config]:
    """Returns the configuration of each set of groups, with the keys of a file and `overrides`."""
    own = {name: [f"run.dir={folder}/{name.replace(': ', '_').replace(' ', '_')}", *GROUPS[name]] for name in groups}
    return {name: load_config(file, [*overrides, *keys]) for name, keys in own.items()}


@dataclass(frozen=True)
class Blocks:
    """Running worker groups, and what they work on in every step: the same prompts, with the same seeds."""

    running: Mapping[str, Running]
    prompts: SamePrompts
    scorer: Scorer

    async def run(self, variant: Variant, num_steps: int) -> Block:
        """Trains a few steps from the initial models, and returns what was measured."""
        folder, workers = self.running[variant.groups]
        await gather_calls(*(client.load_checkpoint(0) for client in workers.trained))
        config = block_config(folder.config, variant, num_steps)
        await run_block(config, folder, workers, self.prompts, self.scorer)
        return Block(config, read_metrics(config.run.dir / METRICS_FILE), read_trace(config.run.dir / TRACE_FILE))


@asynccontextmanager
async def started(configs: Mapping[str, Config], *, shuffle: bool = False) -> AsyncIterator[Blocks]:
    """Starts the groups of each configuration for the `with` block; all configurations have the same data."""
    config = next(iter(configs.values()))
    tokenizer = load_tokenizer(config.actor.model)
    table = load_prompts(config.data, tokenizer, "train")
    prompts = SamePrompts(table, config.data.train_batch_size, config.run.seed, shuffle=shuffle)
    encode = (
        load_reward_tokenizer(config.reward_model, table, is_model_here=True) if config.reward_model.model else None
    )
    async with AsyncExitStack() as stack:
        running = {name: await start(stack, config) for name, config in configs.items()}
        manager = await stack.enter_async_context(RewardManager(config.reward, table.data_sources))
        yield Blocks(running, prompts, Scorer(tokenizer, manager, encode))


async def start(stack: AsyncExitStack, config: Config) -> Running:
    """Starts worker groups, which the stack ends."""
    folder = stack.enter_context(RunFolder(config))
    caller = Caller(folder.lease.run_id, folder.lease.epoch, nonce=folder.lease.nonce)
    groups = WorkerGroups(folder.config, folder.config_file, caller, lambda *_: None)
    stack.push_async_callback(groups.close)
    return Running(folder, await groups.connect())


def block_config(config: Config, variant: Variant, num_steps: int) -> Config:
    """Returns the configuration of a block."""
    run = config.run.model_copy(update={"total_steps": num_steps, "schedule": variant.schedule})
    rollout = config.rollout.model_copy(update={"stream_groups": variant.num_parts, "share": variant.share})
    estimator = config.algorithm.adv_estimator if variant.has_critic else CRITIC_FREE_ESTIMATOR
    algorithm = config.algorithm.model_copy(update={"adv_estimator": estimator})
    return config.model_copy(update={"run": run, "rollout": rollout, "algorithm": algorithm})
