"""Measures what split placement brings: step times of the schedules, in one run on the same rollouts.

    python -m benchmarks.overlap [--rounds 4] [--steps 4] [--critics] [key.path=value ...]

Both groups of the quickstart are started once, one thread each. Blocks of steps alternate between the schedules serial,
gather and overlap, overlap with streamed generation, and a critic-free variant (GRPO, no critic). The first step of
each block is left out. Learning rates are 0 and every step gets the same prompts and seeds, so all steps work on the
same rollouts. Figures are medians; only ratios within one run mean anything on a shared machine.

With --critics, random policies of eight layers have critics of eight, four and two layers, in turns; each is compared
with critic-free steps of the same groups, in a block beside its own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import uvloop

from controller.commands.planner.part_shares import part_shares
from controller.data.prompts import PromptBatch, PromptDataset, load_prompts
from controller.data.tokenizer import load_tokenizer
from controller.run.checkpoint_writer import CheckpointWriter
from controller.run.folder import RunFolder
from controller.run.state import RunState
from controller.sampling.stream import SamplingGroups
from controller.scoring.scorer import Scorer
from controller.step.rollouts import StepRollouts
from controller.tracking.display import open_display
from controller.tracking.recorder import Recorder
from controller.tracking.sinks.step_files import StepFiles
from controller.trainer import Trainer
from controller.validation.evaluation import Evaluator
from controller.workers.clients import Caller
from controller.workers.concurrency import gather_calls
from controller.workers.worker_groups import WorkerGroups, Workers
from recipes.sort_letters.prepare import prepare
from rewards.manager import RewardManager
from splitppo.batch import Batch
from splitppo.config import Config, load_config
from splitppo.config.resolve import AUTO_PARTS
from splitppo.run_folder.step_file import METRICS_FILE, read_metrics

RECIPE = Path("recipes/sort_letters/cpu.yaml")
RECIPE_MODEL = Path(".cache/sort_letters/model")
CRITIC_LAYERS = (8, 4, 2)  # the policy has as many as the first
CRITIC_FREE = "critic-free"
STREAMED = "streamed"  # overlap, the responses sent on in parts
VARIANTS = ("serial", "gather", "overlap", STREAMED, CRITIC_FREE)
SCHEDULES = {STREAMED: "overlap", CRITIC_FREE: "gather"}
Row = Mapping[str, float]


class SamePrompts(PromptDataset):
    """Gives every step the prompts and the seeds of step 1."""

    def batch_at(self, step: int) -> PromptBatch:  # noqa: ARG002 - the point of it
        """Returns the batch of step 1, whose seeds do not depend on the step either."""
        return _FirstStepBatch(**vars(super().batch_at(1)))


@dataclass(frozen=True, eq=False)
class _FirstStepBatch(PromptBatch):
    def to_batch(self, run_seed: int, step: int, num_samples: int, **others: Any) -> Batch:  # noqa: ARG002
        return super().to_batch(run_seed, 1, num_samples, **others)


class Silent:
    """A stream that drops the lines of the display."""

    def write(self, text: str) -> int:
        """Writes nothing."""
        return len(text)

    def flush(self) -> None:
        """Flushes nothing, since nothing is kept."""


def variant_config(config: Config, variant: str, num_steps: int) -> Config:
    """Returns the configuration of a block."""
    run = config.run.model_copy(update={"schedule": SCHEDULES.get(variant, variant), "total_steps": num_steps})
    rollout = config.rollout.model_copy(update={"stream_groups": AUTO_PARTS if variant == STREAMED else 1})
    estimator = "reinforce_plus_plus" if variant == CRITIC_FREE else "gae"
    algorithm = config.algorithm.model_copy(update={"adv_estimator": estimator})
    return config.model_copy(update={"run": run, "rollout": rollout, "algorithm": algorithm})


async def measure(
    config: Config, num_rounds: int, num_steps: int, variants: Sequence[str] = VARIANTS
) -> dict[str, list[Row]]:
    """Runs all blocks; returns the metrics lines of each variant, without the first step of each block."""
    tokenizer = load_tokenizer(config.actor.model)
    table = load_prompts(config.data, tokenizer, "train")
    prompts = SamePrompts(table, config.data.train_batch_size, config.run.seed, config.data.shuffle)
    rows: dict[str, list[Row]] = defaultdict(list)
    with RunFolder(config) as folder:
        lease = folder.lease
        caller = Caller(lease.run_id, lease.epoch, nonce=lease.nonce)
        groups = WorkerGroups(folder.config, folder.config_file, caller, lambda *_: None)
        try:
            async with RewardManager(config.reward, prompts.table.data_sources) as manager:
                workers = await groups.connect()
                for _ in range(num_rounds):
                    for variant in variants:
                        await gather_calls(*(client.load_checkpoint(0) for client in workers.clients))
                        block = variant_config(config, variant, num_steps)
                        await run_block(block, folder, workers, prompts, Scorer(tokenizer, manager))
                        rows[variant] += read_metrics(config.run.dir / METRICS_FILE)[1:]
        finally:
            await groups.close()
    return rows


async def run_block(
    config: Config, folder: RunFolder, workers: Workers, prompts: PromptDataset, scorer: Scorer
) -> None:
    """Trains a few steps from the initial models with the trainer that users run."""
    if "rollout" not in config.sampling_roles:
        workers = replace(workers, rollout=None)
    sampling = SamplingGroups.of(config, workers)  # its versions of the policy are those of this block
    if not config.uses_critic:
        workers = replace(workers, critic=None)
    clients = workers.clients
    recorder = Recorder(config, [StepFiles(config, folder.path).receive, open_display(Silent()).receive])
    recorder.restart_at(0, clients, None)
    trainer = Trainer(
        config,
        workers,
        sampling,
        StepRollouts(prompts),
        scorer,
        Evaluator(config, sampling, None, scorer),
        CheckpointWriter(folder.checkpoints, clients, config, on_saved=recorder.add_spans, on_commit=recorder.release),
        recorder,
        RunState.initial(config),
    )
    await trainer.fit()
    recorder.release_all()


def median(rows: Sequence[Row], name: str) -> float:
    """Returns the median of a metric, in its unit; NaN if no row has it."""
    values = [row[name] for row in rows if row.get(name) is not None]
    return statistics.median(values) if values else float("nan")


def expected_step_s(variant: str, serial: Sequence[Row]) -> float:
    """Returns the step time by the formula (docs/architecture.md), from the parts that serial has timed.

    Some parts may be missing.
    """
    gen, old, ref, values, reward, adv, actor, critic = (
        median(serial, f"timing_s/{name}") if f"timing_s/{name}" in serial[0] else 0.0
        for name in ("gen", "old_log_prob", "ref", "values", "reward", "adv", "update_actor", "update_critic")
    )
    middle = max(old + ref, values, reward)
    overlap = gen + middle + adv + actor + max(0.0, critic - actor - gen)
    return {
        "serial": gen + old + ref + values + reward + adv + actor + critic,
        "gather": gen + middle + adv + max(actor, critic),
        "overlap": overlap,
        STREAMED: overlap - middle + max(old + ref, max(values, reward) * part_shares(AUTO_PARTS)[-1]),
        CRITIC_FREE: gen + max(old + ref, reward) + adv + actor,
    }[variant]


def report(rows: Mapping[str, Sequence[Row]]) -> str:
    """Returns the table, and the two ratios that the schedules promise."""
    serial = rows["serial"]
    lines = [
        f"{'schedule':<12}{'steps':>6}{'step ms':>9}{'formula ms':>11}{'vs serial':>10}{'eta':>6}"
        f"{'bubble actor':>13}{'bubble critic':>14}{'idle':>6}"
    ]
    for variant in VARIANTS:
        step_s = median(rows[variant], "timing_s/step")
        figures = [
            median(rows[variant], f"overlap/{name}")
            for name in ("efficiency", "bubble_actor", "bubble_critic", "idle_fraction")
        ]
        eta, bubble_actor, bubble_critic, idle = figures
        lines.append(
            f"{variant:<12}{len(rows[variant]):>6}{step_s * 1e3:>9.0f}{expected_step_s(variant, serial) * 1e3:>11.0f}"
            f"{step_s / median(serial, 'timing_s/step'):>10.2f}{eta:>6.2f}{bubble_actor:>13.2f}{bubble_critic:>14.2f}"
            f"{idle:>6.2f}"
        )
    slower = max(median(serial, "timing_s/update_actor"), median(serial, "timing_s/update_critic"))
    phase = median(rows["gather"], "timing_s/update_actor_critic")
    overlap, gather, streamed, free = (
        median(rows[name], "timing_s/step") for name in ("overlap", "gather", STREAMED, CRITIC_FREE)
    )
    lines += [
        "",
        f"gather's update phase / slower role's update in serial: {phase / slower:.2f} (goal: at most 1.15)",
        f"overlap's step / gather's step: {overlap / gather:.2f} (goal: at most 1)",
        f"overlap's step streamed in {AUTO_PARTS} parts / unstreamed: {streamed / overlap:.2f}",
        f"overlap's step / critic-free step: {overlap / free:.2f} (1: the critic costs no wall-clock time)",
    ]
    return "\n".join(lines)


def compare_critics(fixed: Sequence[str], folder: Path, num_rounds: int, num_steps: int) -> str:
    """Measures critics of several sizes in turns, each beside critic-free steps of the same groups; returns a table."""
    models = {layers: save_random_model(folder / f"{layers}_layers", layers) for layers in CRITIC_LAYERS}
    blocks: dict[int, list[dict[str, list[Row]]]] = defaultdict(list)
    for number in range(num_rounds):
        for layers in CRITIC_LAYERS:
            run_dir = f"run.dir={folder}/run_{number}_{layers}"
            keys = [f"actor.model={models[CRITIC_LAYERS[0]]}", f"critic.model={models[layers]}", run_dir]
            config = load_config(RECIPE, [*fixed, *keys])
            measuring = measure(config, 1, num_steps, ("overlap", CRITIC_FREE))
            blocks[layers].append(asyncio.Runner(loop_factory=uvloop.new_event_loop).run(measuring))
    lines = [f"{'critic':<10}{'step ms':>9}{'free ms':>9}{'step / critic-free step':>32}{'critic busy':>13}"]
    for layers, measured in blocks.items():
        steps_s, free_s = (
            [median(rows[name], "timing_s/step") for rows in measured] for name in ("overlap", CRITIC_FREE)
        )
        ratios = sorted(step_s / own_s for step_s, own_s in zip(steps_s, free_s, strict=True))
        busy = 1.0 - statistics.median(median(rows["overlap"], "overlap/bubble_critic") for rows in measured)
        range_of_ratios = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        step_ms, free_ms = (statistics.median(seconds) * 1e3 for seconds in (steps_s, free_s))
        size = layers / CRITIC_LAYERS[0]
        lines.append(f"{size:<10g}{step_ms:>9.0f}{free_ms:>9.0f}{range_of_ratios:>32}{busy:>13.2f}")
    return "\n".join(lines)


def save_random_model(folder: Path, num_layers: int) -> Path:
    """Writes a random policy with the recipe's tokenizer, and returns its folder."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    shutil.copytree(RECIPE_MODEL, folder)
    described = json.loads((folder / "config.json").read_text())
    described = {name: value for name, value in described.items() if name not in ("head_dim", "layer_types")}
    sizes = {"hidden_size": 256, "intermediate_size": 768, "num_attention_heads": 4, "num_key_value_heads": 4}
    changed = {**described, **sizes, "num_hidden_layers": num_layers}
    torch.manual_seed(num_layers)
    Qwen2ForCausalLM(Qwen2Config.from_dict(changed)).save_pretrained(folder)
    return folder


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4, help="blocks per schedule")
    parser.add_argument("--steps", type=int, default=4, help="steps per block; the first is left out")
    parser.add_argument("--critics", action="store_true", help="critics of several sizes instead of schedules")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value")
    options = parser.parse_args()
    prepare(Path(".cache/sort_letters"))
    with tempfile.TemporaryDirectory() as folder:
        fixed = [
            "actor.lr=0",
            "critic.lr=0",
            "tracking.trackers=[]",
            "checkpoint.save_freq=-1",
            "checkpoint.save_last=false",
        ]
        if options.critics:
            print(compare_critics([*fixed, *options.overrides], Path(folder), options.rounds, options.steps))
            return
        config = load_config(RECIPE, [*fixed, f"run.dir={folder}/run", *options.overrides])
        rows = asyncio.Runner(loop_factory=uvloop.new_event_loop).run(measure(config, options.rounds, options.steps))
        print(report(rows))


if __name__ == "__main__":
    main()
