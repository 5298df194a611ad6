"""Runs with forced lengths of responses: random models, prompts, pairs of groups, variants of a block of steps.

Learning rates are 0, so with the same prompts and seeds every step works on the same rollouts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2ForSequenceClassification

from controller.run.folder import RunFolder
from controller.workers.client import Caller
from controller.workers.worker_groups import WorkerGroups, Workers
from recipes.qwen2_tokenizer import save_tokenizer
from recipes.sort_letters.prepare import EOS, PAD, make_tokenizer
from splitppo.config import Config
from splitppo.config.load import validate

ROWS, PROMPT_TOKENS, MINI_BATCHES = 64, 64, 4
REWARD = "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return 0.0\n"


class Variant(NamedTuple):
    """The settings that a block of steps is run with."""

    reference: str
    num_parts: int
    has_critic: bool = True

    def __str__(self) -> str:
        parts = f"{self.num_parts} parts" if self.num_parts > 1 else "unstreamed"
        return f"reference: {self.reference}, {parts}" + ("" if self.has_critic else ", critic-free")


# GRPO: no values, the KL of the same reference; the critic's group only waits.
CRITIC_FREE = Variant("actor", 1, has_critic=False)


class Running(NamedTuple):
    """A pair of groups, and the run folder that they were started from."""

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


def make_config(
    folder: Path, reference: str, lengths: Mapping[str, Any], max_response: int, model: Mapping[str, Any]
) -> Config:
    """Returns the configuration of a pair of groups: defaults, except for the sizes and `model` of both sections."""
    model = {"ppo_mini_batch_size": ROWS // MINI_BATCHES, "lr": 0.0, **model}
    tree: dict[str, Any] = {
        "run": {"dir": str(folder / f"reference_{reference}"), "total_steps": 1, "schedule": "overlap"},
        "data": {
            "train_files": str(folder / "train.jsonl"),
            "train_batch_size": ROWS,
            "max_prompt_length": PROMPT_TOKENS,
            "max_response_length": max_response,
        },
        "algorithm": {"use_kl_in_reward": True},
        "actor": {"model": str(folder / "policy"), **model},
        "critic": model,
        "placement": {"reference": reference},
        "reward": {"custom_function_path": str(folder / "reward.py"), "num_workers": 1},
        "evaluation": {"val_before_train": False},
        "tracking": {"trackers": []},
        "checkpoint": {"save_freq": -1, "save_last": False},
        "services": {role: {"threads": 1} for role in ("actor", "critic")},
        "debug": {"response_lengths": lengths},
    }
    return validate(tree, "benchmark")


async def start(stack: AsyncExitStack, config: Config) -> Running:
    """Starts a pair of groups, which the stack ends."""
    folder = stack.enter_context(RunFolder(config))
    caller = Caller(folder.lease.run_id, folder.lease.epoch, nonce=folder.lease.nonce)
    groups = WorkerGroups(folder.config, folder.config_file, caller, lambda *_: None)
    stack.push_async_callback(groups.close)
    return Running(folder, await groups.connect())


def block_config(config: Config, variant: Variant, num_steps: int) -> Config:
    """Returns the configuration of a block."""
    run = config.run.model_copy(update={"total_steps": num_steps})
    rollout = config.rollout.model_copy(update={"stream_groups": variant.num_parts})
    estimator = config.algorithm.adv_estimator if variant.has_critic else "reinforce_plus_plus"
    algorithm = config.algorithm.model_copy(update={"adv_estimator": estimator})
    return config.model_copy(update={"run": run, "rollout": rollout, "algorithm": algorithm})
