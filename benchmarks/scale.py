"""Measures the cost of the controller itself as steps grow: CPU, memory, and seconds in which all engines wait for it.

    python -m benchmarks.scale [--sizes 1024x1024 8192x4096] [--steps 3] [--step-s 30] [--lengths fixed|varied]

The trainer that users run, over the real wire, with both groups' runtime; only the engines sleep
(benchmarks/sleeping_engine.py), `--step-s` seconds in every step under `gather`. Sizes are responses x tokens of the
longest one. Per size, the median over the steps but the first of
  CPU      seconds of the controller's process, all threads, without decoding and scoring
  adv      seconds in which advantages, and what else is numpy, were computed
  wire     seconds in which no engine worked, beside adv: transfer that nothing hides, and calls
  peak     growth of the controller's memory over what it held before the first step, as multiples of the columns
and in a row of its own what decoding and scoring the last step's responses takes, in CPU-seconds: of the controller,
and of its scoring processes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import uvloop
import yaml

from benchmarks.overlap import Silent
from benchmarks.sleeping_engine import SETTINGS, VARIED
from controller.data.prompt_files import PromptRow
from controller.data.prompts import PromptBatch, PromptDataset
from controller.data.tokenizer import load_tokenizer
from controller.ppo.scores import Scores, objects
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
from controller.workers.worker_groups import WorkerGroups, Workers
from recipes.qwen2_tokenizer import save_tokenizer, train_tokenizer
from rewards.manager import RewardManager
from splitppo.batch import Batch, Column
from splitppo.config import Config
from splitppo.config.load import validate
from splitppo.run_folder.step_file import METRICS_FILE, read_metrics
from tests.support.scores import make_scores

SIZES = ("1024x1024", "8192x1024", "1024x8192", "4096x4096", "8192x4096")
SAMPLES = 8  # per prompt
PROMPT_TOKENS = 256
# Shares of a step of engine time under `gather`, the longer branch: 0.4 + max(0.1 + 0.1, 0.15) + max(0.4, 0.4).
SHARES = {
    "Generate": 0.4,
    "ComputeLogProbs": 0.1,
    "ComputeRefLogProbs": 0.1,
    "ComputeValues": 0.15,
    "ActorUpdate": 0.4,
    "CriticUpdate": 0.4,
}
LONG_STEP_S = 30.0  # what a step of the largest size takes at least on GPUs
START_TIMEOUT_S = 120.0
MIB = 1 << 20


@dataclass(frozen=True)
class Row:
    """The cost of one step for the controller, in seconds and bytes."""

    wall_s: float
    cpu_s: float
    adv_s: float
    wire_s: float
    peak_bytes: int
    columns_bytes: int


class StandInScorer(Scorer):
    """A scorer that looks at nothing: decoding and scoring are measured on their own."""

    def __init__(self) -> None:
        self.last: tuple[PromptBatch, Batch] | None = None

    async def score(self, prompts: PromptBatch, rollouts: Batch, *_: Any, num_examine: int) -> Scores:  # noqa: ARG002
        """Scores every other response as right."""
        self.last = prompts, rollouts
        num_rows = len(prompts.row_indices)
        return make_scores(
            (np.arange(num_rows) % 2).astype(np.float32),
            data_sources=objects("gsm8k" for _ in range(num_rows)),
            prompt_indices=prompts.row_indices,
        )


def make_prompts(num_prompts: int) -> PromptDataset:
    """Returns prompts of equal length, the same for every step."""
    random = np.random.default_rng(1)
    ids = random.integers(4, 100, num_prompts * PROMPT_TOKENS, dtype=np.int32)
    rows = tuple(PromptRow(f"row {row}", "", "gsm8k", "18", {}) for row in range(num_prompts))
    column = Column(ids, np.full(num_prompts, PROMPT_TOKENS, np.int32))
    table = PromptBatch(np.arange(num_prompts), column, ("",) * num_prompts, rows)
    return PromptDataset(table, num_prompts, seed=1, shuffle=False)


def make_config(folder: Path, schedule: str) -> Config:
    """Returns the configuration of the groups; sizes are set step by step."""
    return validate(
        {
            "run": {"dir": str(folder / "run"), "total_steps": 1000, "schedule": schedule},
            "data": {"train_files": "unused", "train_batch_size": SAMPLES, "max_response_length": 1},
            "rollout": {"n": SAMPLES},
            # As where an engine of its own samples: both log-probs travel.
            "algorithm": {"use_kl_in_reward": True, "rollout_correction": {"bypass_mode": False}},
            "actor": {"model": str(folder / "model")},
            "placement": {"reference": "actor"},
            "tracking": {"trackers": [], "sample_freq": -1},
            "evaluation": {"val_before_train": False},
            "checkpoint": {"save_freq": -1, "save_last": False},
            "services": {"launch": "external", "max_held_bytes": 1 << 35},
        },
        "the benchmark",
    )


def sized(config: Config, num_responses: int, num_tokens: int, num_steps: int) -> Config:
    """Returns the configuration of one size."""
    batch_size = num_responses // SAMPLES
    data = config.data.model_copy(update={"train_batch_size": batch_size, "max_response_length": num_tokens})
    models = {
        role: config.trained_model_of(role).model_copy(update={"ppo_mini_batch_size": max(1, batch_size // 4)})
        for role in config.trained_roles
    }
    run = config.run.model_copy(update={"total_steps": num_steps})
    return config.model_copy(update={"data": data, "run": run, **models})


@contextmanager
def sleeping_groups(config: Config) -> Iterator[Config]:
    """Starts both groups; yields the configuration with their addresses."""
    run_dir = config.run.dir
    file = run_dir / "groups.yaml"
    file.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    groups = []
    try:
        for role in config.roles:
            torchrun = [sys.executable, "-m", "services.runtime.group.torchrun", "--nproc-per-node", "1"]
            module = ["-m", "benchmarks.sleeping_engine", role, "--config", str(file), "--lifeline"]
            with (run_dir / f"{role}.out").open("wb") as output:
                groups.append(
                    subprocess.Popen(
                        [*torchrun, *module],
                        stdin=subprocess.PIPE,
                        stdout=output,
                        stderr=output,
                        start_new_session=True,
                    )
                )
        addresses = {role: announced(run_dir, role) for role in config.roles}
        services = {
            role: config.services.of(role).model_copy(update={"address": addresses[role]}) for role in config.roles
        }
        yield config.model_copy(update={"services": config.services.model_copy(update=services)})
    finally:
        for group in groups:
            assert group.stdin is not None
            group.stdin.close()  # the lifeline: every rank ends
            group.wait()


def announced(run_dir: Path, role: str) -> str:
    """Returns the address of a group, as soon as it takes calls."""
    announcement = run_dir / "services" / f"{role}.json"
    deadline = time.monotonic() + START_TIMEOUT_S
    while not announcement.exists():
        if time.monotonic() > deadline:
            raise SystemExit(f"the {role} did not come up: {(run_dir / f'{role}.out').read_text()}")
        time.sleep(0.1)
    return str(json.loads(announcement.read_text())["address"])


def resident_bytes(field: str) -> int:
    """Returns VmRSS, or VmHWM, the highest value since `forget_peak`."""
    status = Path("/proc/self/status").read_text()
    return int(status.split(f"{field}:")[1].split()[0]) << 10


def forget_peak() -> None:
    """Makes VmHWM count from now on."""
    Path("/proc/self/clear_refs").write_text("5")


class Meter(Trainer):
    """A trainer that looks at this process before and after every step."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.cpu_s: list[float] = []
        self.columns_bytes = 0

    async def train_step(self) -> None:
        """Trains a step, and measures the CPU time of everything up to the next step."""
        self.cpu_s.append(time.process_time())
        await super().train_step()
        experience = self.recorder.current.experience
        assert experience is not None
        self.columns_bytes = experience.batch.held_bytes


async def measure(
    config: Config, folder: RunFolder, workers: Workers, prompts: PromptDataset, scorer: Scorer
) -> list[Row]:
    """Returns all steps of one size except the first."""
    forget_peak()
    before_bytes = resident_bytes("VmRSS")
    recorder = Recorder(config, [StepFiles(config, folder.path).receive, open_display(Silent()).receive])
    recorder.restart_at(0, workers.clients, None)
    sampling = SamplingGroups.of(config, workers)
    evaluator = Evaluator(config, sampling, None, scorer)
    checkpoints = CheckpointWriter(
        folder.checkpoints, workers.trained, config, on_saved=recorder.add_spans, on_commit=recorder.release
    )
    rollouts = StepRollouts(prompts)
    trainer = Meter(
        config, workers, sampling, rollouts, scorer, evaluator, checkpoints, recorder, RunState.initial(config)
    )
    await trainer.fit()
    recorder.release_all()
    ends_s = [*trainer.cpu_s[1:], time.process_time()]
    cpu_s = [end_s - start_s for start_s, end_s in zip(trainer.cpu_s, ends_s, strict=True)]
    peak_bytes = resident_bytes("VmHWM") - before_bytes
    rows = []
    for line, seconds in zip(read_metrics(config.run.dir / METRICS_FILE), cpu_s, strict=True):
        step_s = line["timing_s/step"]
        adv_s = line["timing_s/adv"]
        wire_s = line["overlap/idle_fraction"] * step_s - adv_s
        rows.append(Row(step_s, seconds, adv_s, wire_s, peak_bytes, trainer.columns_bytes))
    return rows[1:]


async def measure_scoring(model: Path, prompts: PromptBatch, rollouts: Batch) -> tuple[float, float]:
    """Returns the CPU-seconds of this process and of the scoring processes for the responses of a step."""
    config = validate({"run": {"dir": "x", "total_steps": 1}, "data": {"train_files": "x", "train_batch_size": 1},
                       "actor": {"model": "x"}}, "the benchmark")  # fmt: skip
    tokenizer = load_tokenizer(str(model))
    async with RewardManager(config.reward, ["gsm8k"]) as manager:
        scorer = Scorer(tokenizer, manager)
        started = os.times()
        await scorer.score(prompts, rollouts, num_examine=0)
        own = os.times()
    ended = os.times()  # the scoring processes have been waited for
    children_s = ended.children_user + ended.children_system - started.children_user - started.children_system
    return own.user + own.system - started.user - started.system, children_s


def report(size: str, rows: list[Row], scoring: tuple[float, float], step_s: float) -> str:
    """Returns one line of the table."""
    wall_s, cpu_s, adv_s, wire_s = (
        statistics.median(getattr(row, name) for row in rows) for name in ("wall_s", "cpu_s", "adv_s", "wire_s")
    )
    columns = rows[0].columns_bytes
    peak = rows[0].peak_bytes
    return (
        f"| {size} | {columns / MIB:.0f} | {cpu_s:.2f} | {adv_s:.2f} | {wire_s:.2f} | {wire_s / LONG_STEP_S:.1%} |"
        f" {peak / columns:.1f} | {wall_s - step_s:.2f} | {scoring[0]:.1f} + {scoring[1]:.1f} |"
    )


HEAD = (
    "| responses x tokens | columns MiB | CPU s | adv s | wire s | of a 30 s step | peak / columns | step - engines s |"
    " scoring CPU s |\n|---|---|---|---|---|---|---|---|---|"
)


async def run(options: argparse.Namespace, folder: Path) -> None:
    """Measures one size after the other, with the same groups."""
    config = make_config(folder, options.schedule)
    engine_s: dict[str, Any] = {name: share * options.step_s for name, share in SHARES.items()}
    (config.run.dir / SETTINGS).write_text(json.dumps(engine_s | {VARIED: options.lengths == "varied"}))
    print(HEAD, flush=True)
    with sleeping_groups(config) as reachable, RunFolder(reachable) as run_folder:
        lease = run_folder.lease
        caller = Caller(lease.run_id, lease.epoch, nonce=lease.nonce)
        groups = WorkerGroups(run_folder.config, run_folder.config_file, caller, lambda *_: None)
        try:
            for size in options.sizes:
                workers = await groups.connect()
                for client in workers.clients:
                    await client.load_checkpoint(0)
                num_responses, num_tokens = map(int, size.split("x"))
                block = sized(run_folder.config, num_responses, num_tokens, options.steps)
                scorer = StandInScorer()
                rows = await measure(block, run_folder, workers, make_prompts(num_responses // SAMPLES), scorer)
                scoring = (0.0, 0.0)
                if options.scoring:
                    assert scorer.last is not None
                    scoring = await measure_scoring(folder / "model", *scorer.last)
                print(report(size, rows, scoring, options.step_s), flush=True)
        finally:
            await groups.close()


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=SIZES, metavar="ROWSxTOKENS")
    parser.add_argument("--steps", type=int, default=3, help="per size; the first is left out")
    parser.add_argument("--step-s", type=float, default=LONG_STEP_S, help="seconds that the engines take under gather")
    parser.add_argument("--schedule", choices=("serial", "gather", "overlap"), default="gather")
    parser.add_argument("--lengths", choices=("fixed", "varied"), default="fixed")
    parser.add_argument("--no-scoring", dest="scoring", action="store_false", help="leave out decoding and scoring")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / "run").mkdir()
        texts = [f"the answer to question {number} is {number * number}" for number in range(1000)]
        tokenizer = train_tokenizer(texts, vocab_size=400, special_tokens=["<eos>"])
        save_tokenizer(tokenizer, folder / "model", named_tokens={"eos_token": "<eos>"})
        asyncio.Runner(loop_factory=uvloop.new_event_loop).run(run(options, folder))


if __name__ == "__main__":
    main()
