"""Compares the planner's predictions with measurements: three schedules, two places of the reference, and colocated.

    python -m benchmarks.planner [--rounds 4] [--steps 4] [key.path=value ...]

Three pairs of groups of the quickstart's models run side by side: split with the reference on the actor, split with the
reference on the critic, one thread each, and colocated: two threads each, of which only one pair works at a time.
Blocks of steps alternate between all of them; the first step of a block is left out, and all steps work on the same
rollouts. In every round the planner gets the phases of `serial` and `gather` with the reference on the actor, and of
the colocated blocks, and predicts every step time of this round. Figures are medians over the rounds, since a shared
machine is not as fast in one round as in another.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import uvloop

from benchmarks.overlap import RECIPE, SamePrompts, run_block
from controller.commands.planner.measured import Measurement, measurement_of
from controller.commands.planner.place import Layout
from controller.commands.planner.plans import make_plans
from controller.data.prompts import load_prompts
from controller.data.tokenizer import load_tokenizer
from controller.run.folder import RunFolder
from controller.scoring.scorer import Scorer
from controller.workers.clients import Caller
from controller.workers.concurrency import gather_calls
from controller.workers.worker_groups import WorkerGroups, Workers
from recipes.sort_letters.prepare import prepare
from rewards.manager import RewardManager
from splitppo.config import Config, Schedule, load_config
from splitppo.run_folder.spans import Span
from splitppo.run_folder.step_file import METRICS_FILE, read_metrics
from splitppo.run_folder.trace import TRACE_FILE, read_trace

PAIRS = {
    "actor": ("placement.reference=actor", "services.actor.threads=1", "services.critic.threads=1"),
    "critic": ("placement.reference=critic", "services.actor.threads=1", "services.critic.threads=1"),
    "colocated": ("placement.reference=actor", "services.actor.threads=2", "services.critic.threads=2"),
}
SETTINGS = (
    "actor.lr=0",
    "critic.lr=0",
    "tracking.trackers=[]",
    "checkpoint.save_freq=-1",
    "checkpoint.save_last=false",
)
Variant = tuple[Layout, str]  # and the reference's host
Block = tuple[Sequence[Mapping[str, Any]], Sequence[Span]]


@dataclass(frozen=True)
class Pair:
    """Two running groups."""

    folder: RunFolder
    workers: Workers


def variants() -> list[Variant]:
    """Returns all variants that are measured."""
    schedules: Sequence[Schedule] = get_args(Schedule)
    return [*((schedule, host) for schedule in schedules for host in ("actor", "critic")), ("colocated", "actor")]


async def measure(configs: Mapping[str, Config], num_rounds: int, num_steps: int) -> dict[Variant, list[Block]]:
    """Runs all blocks in turn."""
    config = configs["actor"]
    tokenizer = load_tokenizer(config.actor.model)
    table = load_prompts(config.data, tokenizer, "train")
    prompts = SamePrompts(table, config.data.train_batch_size, config.run.seed, config.data.shuffle)
    blocks: dict[Variant, list[Block]] = defaultdict(list)
    async with AsyncExitStack() as stack:
        pairs = {name: await start(stack, one) for name, one in configs.items()}
        manager = await stack.enter_async_context(RewardManager(config.reward, prompts.table.data_sources))
        for _ in range(num_rounds):
            for layout, host in variants():
                pair = pairs["colocated" if layout == "colocated" else host]
                schedule = "serial" if layout == "colocated" else layout
                run = pair.folder.config.run.model_copy(update={"schedule": schedule, "total_steps": num_steps})
                block = pair.folder.config.model_copy(update={"run": run})
                await gather_calls(*(client.load_checkpoint(0) for client in pair.workers.clients))
                await run_block(block, pair.folder, pair.workers, prompts, Scorer(tokenizer, manager))
                lines = read_metrics(block.run.dir / METRICS_FILE)
                blocks[layout, host].append((lines, read_trace(block.run.dir / TRACE_FILE)))
    return blocks


async def start(stack: AsyncExitStack, config: Config) -> Pair:
    """Starts a pair of groups, which end with the stack."""
    folder = stack.enter_context(RunFolder(config))
    caller = Caller(folder.lease.run_id, folder.lease.epoch, nonce=folder.lease.nonce)
    groups = WorkerGroups(folder.config, folder.config_file, caller, lambda *_: None)
    stack.push_async_callback(groups.close)
    return Pair(folder, await groups.connect())


def measurements(configs: Mapping[str, Config], blocks: Mapping[Variant, Block]) -> dict[Variant, Measurement]:
    """Returns the measurements of each variant in one round, with the configuration that it ran with."""
    found = {}
    for (layout, host), own in blocks.items():
        config = configs["colocated" if layout == "colocated" else host]
        run = config.run.model_copy(update={"schedule": "serial" if layout == "colocated" else layout})
        found[layout, host] = measurement_of(config.model_copy(update={"run": run}), [own], source="the benchmark")
    return found


SOURCES: Sequence[Variant] = (("serial", "actor"), ("gather", "actor"), ("colocated", "actor"))


def report(rounds: Sequence[Mapping[Variant, Measurement]]) -> str:
    """Returns predicted and measured step times; sources are the variants whose phases the planner has got."""
    plans = [make_plans([measured[source] for source in SOURCES], 2) for measured in rounds]
    predicted = [{(row.layout, row.reference or "actor"): row.step_s for row in plan.rows} for plan in plans]
    lines = ["| layout | reference | measured s | predicted s | error | given |", "|---|---|---|---|---|---|"]
    errors = []
    for variant in rounds[0]:
        pairs = [(plan[variant], measured[variant].step_s) for plan, measured in zip(predicted, rounds, strict=True)]
        predicted_s, measured_s = (statistics.median(seconds) for seconds in zip(*pairs, strict=True))
        errors.append(statistics.median(plan_s / own_s - 1.0 for plan_s, own_s in pairs))
        lines.append(
            f"| {variant[0]} | {variant[1]} | {measured_s:.3f} | {predicted_s:.3f} | {errors[-1]:+.1%} |"
            f" {'yes' if variant in SOURCES else ''} |"
        )
    lines += [
        "",
        f"slowdown while both groups work: {statistics.median(plan.slowdown for plan in plans):.2f}",
        f"mean error {statistics.fmean(map(abs, errors)):.1%}, largest {max(errors, key=abs):+.1%}",
        "",
        "ms of each phase, and of it shared with the other group",
    ]
    for variant, first in rounds[0].items():
        own = [measured[variant] for measured in rounds]
        phases = (
            f"{name} {statistics.median(one.phase_s[name] for one in own) * 1e3:.0f}"
            f" ({statistics.median(one.shared_s[name] for one in own) * 1e3:.0f})"
            for name in first.phase_s
        )
        nobody_s = statistics.median(one.idle_s for one in own)
        lines.append(f"{' '.join(variant)}: {', '.join(phases)}, nobody {nobody_s * 1e3:.0f}")
    return "\n".join(lines)


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4, help="blocks per variant")
    parser.add_argument("--steps", type=int, default=4, help="steps per block; the first is left out")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value")
    options = parser.parse_intermixed_args()
    prepare(Path(".cache/sort_letters"))
    # Threads that spin while another group works would take its cores.
    os.environ["OMP_WAIT_POLICY"] = "passive"
    with tempfile.TemporaryDirectory() as folder:
        configs = {
            name: load_config(RECIPE, [f"run.dir={folder}/{name}", *SETTINGS, *options.overrides, *own])
            for name, own in PAIRS.items()
        }
        work = measure(configs, options.rounds, options.steps)
        blocks = asyncio.Runner(loop_factory=uvloop.new_event_loop).run(work)
        rounds = [{variant: own[number] for variant, own in blocks.items()} for number in range(options.rounds)]
        print(report([measurements(configs, one) for one in rounds]))


if __name__ == "__main__":
    main()
