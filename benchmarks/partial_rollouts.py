"""Measures what partial rollouts (`rollout.max_step_tokens`) bring on long tails: learned tokens per second.

    python -m benchmarks.partial_rollouts [--only hf_1 hf_8 flat_1 flat_8] [--rounds 4] [--steps 5] [--simulate]

Response lengths are forced, those of benchmarks/streaming.py: log-normal, median 40, at most 512. A step has 64
responses: to 64 prompts (n = 1) or to 8 (n = 8). Each part compares whole responses ("off") with C = 40 and C = 80
tokens a step, overcommit 1.5, with the same correction (`rollout_is: token`) and schedule (gather).
  hf      a random Qwen2 samples and learns, one thread per group, no reference
  flat    the engine sleeps: a decoding step costs the same for 1 row as for 64, as on a GPU; everything else costs what
          makes generation 60 % of a step of "off"
Each setting has groups of its own, with its own `rollout.max_batch_size` of those in the table that was the fastest.
After the first steps, which learn short responses (15; 3 of "off"), blocks of steps alternate between the settings.
Rates of whole blocks are compared: by wall clock, and by CPU seconds of the actor's process, which other work on the
machine disturbs less (of "flat": by the wall clock alone).

--simulate runs nothing: it prints what the schedule alone would bring with engines of several costs, for more values of
C (benchmarks/partial_simulation.py).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import uvloop

from benchmarks import streaming
from benchmarks.forced_lengths import make_configs
from benchmarks.overlap import Row, Silent
from benchmarks.partial_simulation import Costs, Setting, Work, calibrated, predict
from benchmarks.scale import sleeping_groups
from benchmarks.sleeping_engine import SETTINGS, VARIED
from controller.data.prompts import PromptDataset, load_prompts
from controller.data.tokenizer import load_tokenizer
from controller.run.checkpoint_writer import CheckpointWriter
from controller.run.folder import RunFolder
from controller.run.state import RunState
from controller.sampling.stream import SamplingGroups
from controller.scoring.scorer import Scorer
from controller.step.look_ahead import step_rollouts
from controller.tracking.display import open_display
from controller.tracking.recorder import Recorder
from controller.tracking.sinks.step_files import StepFiles
from controller.trainer import Trainer
from controller.validation.evaluation import Evaluator
from controller.workers.clients import Caller
from controller.workers.concurrency import gather_calls
from controller.workers.worker_groups import WorkerGroups
from rewards.manager import RewardManager
from splitppo.config import Config
from splitppo.config.load import validate
from splitppo.config.subsections.response_lengths import LogNormalLengths
from splitppo.run_folder.processes import Group
from splitppo.run_folder.step_file import METRICS_FILE, read_metrics

RESPONSES = 64  # of a step
MEDIAN = int(streaming.LENGTHS["median"])
PROMPT_TOKENS = 32  # with which generation takes about 60 % of a step of hf without partial rollouts
LEFT_OUT = 15  # steps before partial rollouts are measured
LEFT_OUT_OFF = 3
FLAT = Costs()
SHARE = 0.6  # of generation in a step of "off"


class Part(NamedTuple):
    """An engine, the number of samples, and what is compared: settings in which off comes first."""

    engine: str
    num_samples: int
    settings: Sequence[Setting]

    @property
    def work(self) -> Work:
        """What a step does."""
        lengths = LogNormalLengths(**streaming.LENGTHS)
        return Work(RESPONSES // self.num_samples, self.num_samples, lengths)


def _settings(off: int, on: int) -> Sequence[Setting]:
    return (Setting(None, off), Setting(MEDIAN, on), Setting(2 * MEDIAN, on))


PARTS = {
    f"{engine}_{num_samples}": Part(engine, num_samples, settings)
    for engine, settings in (("hf", _settings(64, 96)), ("flat", _settings(64, 64)))
    for num_samples in (1, 8)
}


@dataclass
class Measured:
    """All blocks of a setting together: learned tokens, seconds, CPU seconds of the actor, and the steps' metrics."""

    num_tokens: int = 0
    wall_s: float = 0.0
    cpu_s: float = 0.0
    lines: list[Row] = field(default_factory=list)

    def mean(self, name: str) -> float:
        """Returns the mean of a metric over the steps that have it; 0 without any."""
        values = [line[name] for line in self.lines if line.get(name) is not None]
        return sum(values) / max(1, len(values))


class Running:
    """A trainer with worker groups of its own, which trains some steps at a time."""

    def __init__(self, trainer: Trainer, folder: Path) -> None:
        self._trainer = trainer
        self._folder = folder
        self.measured = Measured()

    async def train(self, num_steps: int) -> None:
        """Trains the next steps, without measuring them."""
        trainer = self._trainer
        trainer.end = replace(trainer.end, last_step=trainer.state.step + num_steps)
        await trainer.fit()

    async def measure(self, num_steps: int) -> None:
        """Trains the next steps, and adds them to what was measured."""
        first_step = self._trainer.state.step + 1
        num_tokens, cpu_s, began_s = self._trainer.state.tokens, self._cpu_s(), time.monotonic()
        await self.train(num_steps)
        measured = self.measured
        measured.wall_s += time.monotonic() - began_s
        measured.cpu_s += self._cpu_s() - cpu_s
        lines = [line for line in read_metrics(self._folder / METRICS_FILE) if line["step"] >= first_step]
        measured.lines += lines
        measured.num_tokens += round(sum(line["response_length/mean"] for line in lines) * RESPONSES)
        assert self._trainer.state.tokens > num_tokens

    def _cpu_s(self) -> float:
        group = Group.announced(self._folder, "actor")
        assert group is not None
        times = [psutil.Process(rank.pid).cpu_times() for rank in group.processes]
        return float(sum(one.user + one.system for one in times))


def make_config(folder: Path, part: Part, setting: Setting) -> Config:
    """Returns the configuration of a setting, in a run folder of its own."""
    config = make_configs(folder, ["reference: actor"], streaming.LENGTHS, streaming.MAX_RESPONSE, streaming.MODEL)
    tree = config["reference: actor"].model_dump(mode="json")
    num_prompts = RESPONSES // part.num_samples
    tree["run"] |= {"dir": str(folder / f"{part.engine}-{setting.max_step_tokens}"), "schedule": "gather"}
    tree["run"] |= {"total_steps": 10_000}
    tree["data"] |= {"train_batch_size": num_prompts, "max_prompt_length": PROMPT_TOKENS}
    tree["data"] |= {"filter_overlong_prompts": False, "truncation": "left"}
    tree["algorithm"] |= {"use_kl_in_reward": False}
    tree["algorithm"]["rollout_correction"] |= {"rollout_is": "token", "bypass_mode": False}
    for model in ("actor", "critic"):
        tree[model] |= {"ppo_mini_batch_size": num_prompts // 4}
    tree["rollout"] |= {
        "n": part.num_samples,
        "max_batch_size": setting.max_batch_size,
        "stream_groups": 1,
        "check_freq": 0,
        "max_step_tokens": setting.max_step_tokens,
    }
    if setting.max_step_tokens is not None:
        tree["rollout"] |= {"overcommit": setting.overcommit}
    if part.engine == "flat":
        tree["services"] |= {"launch": "external"}
    return validate(tree, "the benchmark")


@asynccontextmanager
async def started(folder: Path, part: Part, step_s: float) -> AsyncIterator[Mapping[Setting, Running]]:
    """Starts groups and trainer of each setting for the `with` block."""
    configs = {setting: make_config(folder, part, setting) for setting in part.settings}
    config = next(iter(configs.values()))
    tokenizer = load_tokenizer(config.actor.model)
    table = load_prompts(config.data, tokenizer, "train")
    async with AsyncExitStack() as stack:
        manager = await stack.enter_async_context(RewardManager(config.reward, table.data_sources))
        scorer = Scorer(tokenizer, manager)
        running = {}
        for setting, of_setting in configs.items():
            of_setting.run.dir.mkdir()
            if part.engine == "flat":
                engine_s = json.dumps(_engine_s(part, step_s))
                (of_setting.run.dir / SETTINGS).write_text(engine_s)
                of_setting = stack.enter_context(sleeping_groups(of_setting))
            prompts = PromptDataset(table, config.data.train_batch_size, config.run.seed, shuffle=True)
            running[setting] = await start(stack, of_setting, prompts, scorer)
        yield running


def _engine_s(part: Part, step_s: float) -> dict[str, Any]:
    """Returns the seconds of the sleeping engine: of a decoding step, `step_s`, and of each token elsewhere."""
    costs = calibrated(part.work, part.settings[0], FLAT, SHARE)
    token_s = costs.per_learned_token * step_s
    computed = {"ComputeLogProbs": 0.25, "ComputeRefLogProbs": 0.0, "ComputeValues": 0.25}
    updates = {"ActorUpdate": 0.75, "CriticUpdate": 0.75}
    shares = computed | updates
    return {"Generate": step_s, VARIED: False} | {name: share * token_s for name, share in shares.items()}


async def start(stack: AsyncExitStack, config: Config, prompts: PromptDataset, scorer: Scorer) -> Running:
    """Starts worker groups, which the stack ends, and the trainer that users run."""
    folder = stack.enter_context(RunFolder(config))
    lease = folder.lease
    caller = Caller(lease.run_id, lease.epoch, nonce=lease.nonce)
    groups = WorkerGroups(folder.config, folder.config_file, caller, lambda *_: None)
    stack.push_async_callback(groups.close)
    workers = await groups.connect()
    await gather_calls(*(client.load_checkpoint(0) for client in workers.trained))
    config = folder.config
    sampling = SamplingGroups.of(config, workers)
    recorder = Recorder(config, [StepFiles(config, folder.path).receive, open_display(Silent()).receive])
    recorder.restart_at(0, workers.clients, None)
    trainer = Trainer(
        config,
        workers,
        sampling,
        step_rollouts(config, prompts, None),
        scorer,
        Evaluator(config, sampling, None, scorer),
        CheckpointWriter(
            folder.checkpoints, workers.trained, config, on_saved=recorder.add_spans, on_commit=recorder.release
        ),
        recorder,
        RunState.initial(config),
    )
    return Running(trainer, folder.path)


async def measure(folder: Path, part: Part, options: argparse.Namespace) -> Mapping[Setting, Measured]:
    """Runs all blocks of a part."""
    async with started(folder, part, options.decoding_ms / 1000) as running:
        for setting, one in running.items():
            await one.train(LEFT_OUT_OFF if setting.max_step_tokens is None else LEFT_OUT)
        for _ in range(options.rounds):
            for one in running.values():
                await one.measure(options.steps)
        return {setting: one.measured for setting, one in running.items()}


HEAD = """
| part | C | `max_batch_size` | learned tokens/s | x off | x off by CPU time | simulated | step s | generation \
| rounds | pending | oldest token | steps |
|---|---|---|---|---|---|---|---|---|---|---|---|---|"""


def report(name: str, part: Part, measured: Mapping[Setting, Measured]) -> str:
    """Returns the lines of a part."""
    off = measured[part.settings[0]]
    lines = []
    for setting, one in measured.items():
        rate = one.num_tokens / one.wall_s
        by_cpu = one.num_tokens / one.cpu_s / (off.num_tokens / off.cpu_s)
        figures = (
            name,
            setting.max_step_tokens or "off",
            setting.max_batch_size,
            f"{rate:.0f}",
            f"{rate / (off.num_tokens / off.wall_s):.2f}",
            f"{by_cpu:.2f}" if part.engine == "hf" else "",
            f"{simulated(part, setting):.2f}" if part.engine == "flat" else "",
            f"{one.mean('timing_s/step'):.2f}",
            f"{one.mean('timing_s/gen') / one.mean('timing_s/step'):.0%}",
            f"{one.mean('partial/num_rounds'):.2f}" if setting.max_step_tokens else "",
            f"{one.mean('partial/num_pending'):.0f}" if setting.max_step_tokens else "",
            f"{max(line.get('partial/max_age', 0) for line in one.lines):.0f}" if setting.max_step_tokens else "",
            len(one.lines),
        )
        lines.append(f"| {' | '.join(map(str, figures))} |")
    return "\n".join(lines)


def simulated(part: Part, setting: Setting, costs: Costs = FLAT) -> float:
    """Returns learned tokens per second, as multiples of off, of an engine with these costs."""
    off = part.settings[0]
    costs = calibrated(part.work, off, costs, SHARE)
    on, without = (predict(part.work, one, costs).tokens_per_cost(costs) for one in (setting, off))
    return on / without


def simulate() -> None:
    """Prints the table of the simulation."""
    columns = ("20", "40", "60", "80", "120", "160")
    print("| engine: a decoding step of R rows costs | n |" + "".join(f" C = {c} |" for c in columns))
    print("|---|---|" + "---|" * len(columns))
    for name, costs, max_batch_size in (
        ("1, up to 64 rows", FLAT, 64),
        ("1 + R / 64", Costs(1 / 64, 0.02), 96),
        ("1 + R / 20", Costs(1 / 20, 0.02), 96),
    ):
        for num_samples in (1, 8):
            part = Part("", num_samples, [Setting(None, 64)])
            ratios = (simulated(part, Setting(int(c), max_batch_size), costs) for c in columns)
            print(f"| {name} | {num_samples} |" + "".join(f" {ratio:.2f} |" for ratio in ratios), flush=True)


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="default: all")
    parser.add_argument("--rounds", type=int, default=4, help="blocks per setting")
    parser.add_argument("--steps", type=int, default=5, help="steps per block")
    parser.add_argument("--hidden", type=int, default=128, help="of the models of hf")
    parser.add_argument("--layers", type=int, default=2, help="of the models of hf")
    parser.add_argument("--decoding-ms", type=float, default=1.0, help="of one decoding step of flat")
    parser.add_argument("--max-batch-size", type=int, nargs=2, metavar=("OFF", "ON"), help="others, to compare")
    parser.add_argument("--simulate", action="store_true", help="run nothing, predict")
    options = parser.parse_args()
    if options.simulate:
        simulate()
        return
    print(HEAD, flush=True)
    for name in options.only:
        part = PARTS[name]
        if options.max_batch_size:
            part = part._replace(settings=_settings(*options.max_batch_size))
        with tempfile.TemporaryDirectory() as folder:
            streaming.make_models(Path(folder), options.hidden, options.layers)
            coroutine = measure(Path(folder), part, options)
            print(report(name, part, asyncio.Runner(loop_factory=uvloop.new_event_loop).run(coroutine)), flush=True)


if __name__ == "__main__":
    main()
