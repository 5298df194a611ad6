"""Predicts the seconds of a training step: the trainer makes some steps with groups that sleep, in virtual time."""

import asyncio
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from controller.commands.planner.measured import ENGINES
from controller.commands.planner.place import Layout
from controller.commands.planner.sleeping import (
    SOURCE,
    SleepingActor,
    SleepingCritic,
    SleepingReward,
    SleepingRollout,
    SleepingScorer,
    StepWork,
)
from controller.commands.planner.virtual_time import Devices, VirtualLoop
from controller.data.prompt_files import PromptRow
from controller.data.prompts import PromptBatch, PromptDataset
from controller.ppo.experience import Experience
from controller.run.checkpoint_store import CheckpointStore
from controller.run.checkpoint_writer import CheckpointWriter
from controller.run.state import RunState
from controller.sampling.stream import SamplingGroups
from controller.step.calls import StepCalls
from controller.step.look_ahead import step_rollouts
from controller.tracking.recorder import Recorder
from controller.tracking.step_record import StepRecord
from controller.trainer import Trainer
from controller.validation.evaluation import Evaluator
from controller.workers.worker_groups import Workers
from splitppo.batch import Column
from splitppo.config import Config
from splitppo.config.load import validate
from splitppo.config.section import RoleName

# After so many steps an overlapped update of the critic is in its steady state.
_NUM_STEPS = 3
_NUM_PROMPTS = 40  # with a response each, enough for shares of a twentieth and for many parts
_NOWHERE = "planned"  # in place of folders and files, which nobody looks for
_POOLS = ("actor", "critic", "reward", "rollout")


@dataclass(frozen=True)
class Dataflow:
    """Says which calls a step has, and at which groups: all that decides what waits for what.

    Attributes:
        layout: the schedule, or "colocated".
        reference, reward_model, teacher: the hosts of the frozen models; None without such a model.
        num_parts: the parts of a streamed generation, of all groups that sample.
        rollout_share: the share of the responses that a rollout group samples; the actor's group samples the others.
        takes_turns: True if the rollout group has the critic's devices.
        staleness: `rollout.staleness`; with 1, a step generates and scores the responses of the next one.
    """

    layout: Layout
    reference: RoleName | None = None
    reward_model: RoleName | None = None
    teacher: RoleName | None = None
    num_parts: int = 1
    rollout_share: float = 0.0
    takes_turns: bool = False
    staleness: int = 0


@dataclass(frozen=True)
class Seconds:
    """The seconds of each kind of work of a step.

    Attributes:
        phase_s: seconds of work of each phase; an absent phase takes 0 s.
        idle_s: seconds of a step in which no group works; they are added to those of the advantages.
        response_share: the share of response tokens in all tokens of a step. A part of a streamed generation ends when
            its share of the decoding is done, and has the share of tokens that `part_shares` gives.
        slowdown: the factor by which work of one of ENGINES takes longer while another one works, too.
    """

    phase_s: Mapping[str, float]
    idle_s: float = 0.0
    response_share: float = 0.0
    slowdown: float = 1.0


@dataclass(frozen=True)
class StepTime:
    """The predicted seconds of a training step, and the idle share (0 to 1) of each pool of devices."""

    step_s: float
    bubbles: Mapping[str, float]


def step_time(flow: Dataflow, seconds: Seconds) -> StepTime:
    """Predicts the seconds of a training step in the steady state, and the idle share of each pool of devices.

    `Trainer.fit` makes a few steps. Which calls a step has, what they wait for, and in which order commands arrive at a
    group are thus those of a run; only the groups sleep. Colocated groups have the schedule serial, so that one call
    comes after the other.
    """
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(_rehearse(flow, seconds))


async def _rehearse(flow: Dataflow, seconds: Seconds) -> StepTime:
    """Lets the trainer make its steps with sleeping groups, and measures the last one; see `step_time`.

    A pool has an idle share of its own only if it has devices of its own: "all" are those of colocated actor and
    critic, and a rollout group that takes turns with the critic has the critic's.
    """
    devices = Devices(slowed=ENGINES, slowdown=seconds.slowdown)
    clock = _Clock()
    await _trainer(flow, seconds, devices, clock).fit()
    from_s, to_s = clock.step_ends_s[_NUM_STEPS - 2 : _NUM_STEPS]
    step_s = to_s - from_s
    busy_s = {pool: devices.busy_s(pool, from_s, to_s) for pool in _POOLS}
    busy_s["all"] = busy_s["actor"] + busy_s["critic"]
    pools = ["all"] if flow.layout == "colocated" else ["actor", "critic"]
    if "reward" in (flow.reward_model, flow.teacher):
        pools.append("reward")
    if flow.rollout_share > 0.0 and not flow.takes_turns:
        pools.append("rollout")
    return StepTime(step_s, {pool: max(0.0, 1.0 - busy_s[pool] / step_s) for pool in pools})


def _trainer(flow: Dataflow, seconds: Seconds, devices: Devices, clock: "_Clock") -> "_Rehearsal":
    """Makes a trainer of which all is real but groups, scorer and prompts: they sleep, and nothing is written."""
    config = _config(flow)
    work = StepWork(
        seconds.phase_s,
        response_share=seconds.response_share,
        rollout_share=flow.rollout_share,
        num_rows=_NUM_PROMPTS,
    )
    of_rollout = "critic" if flow.takes_turns else "rollout"
    workers = Workers.of(
        config,
        SleepingActor("actor", devices, work),
        SleepingCritic("critic", devices, work),
        SleepingReward("reward", devices, work) if "reward" in config.roles else None,
        SleepingRollout(of_rollout, devices, work) if "rollout" in config.roles else None,
    )
    sampling = SamplingGroups.of(config, workers)
    scorer = SleepingScorer(work)
    no_checkpoints = CheckpointWriter(
        CheckpointStore(Path(_NOWHERE)), workers.trained, config, on_saved=lambda _: None, on_commit=lambda _: None
    )
    return _Rehearsal(
        config,
        workers,
        sampling,
        step_rollouts(config, _prompts(), None),
        scorer,
        Evaluator(config, sampling, None, scorer),
        no_checkpoints,
        clock,
        RunState.initial(config),
        own_s=seconds.phase_s.get("adv", 0.0) + seconds.idle_s,
    )


@dataclass(eq=False)
class _Rehearsal(Trainer):
    """A trainer that needs `own_s` seconds once it has the experience: for advantages, and while no group works."""

    own_s: float = field(kw_only=True)

    async def collect(self, calls: StepCalls) -> Experience:
        experience = await super().collect(calls)
        await asyncio.sleep(self.own_s)
        return experience


class _Clock(Recorder):
    """A recorder that only notes when each step has ended, in seconds of the loop."""

    def __init__(self) -> None:  # not the recorder's: there is no run folder
        self.step_ends_s: list[float] = []

    def begin(self, step: int, *, epoch: int = 0) -> StepRecord:
        return _Unlearned(step, 0.0, epoch=epoch)

    def close(self, record: StepRecord) -> None:  # noqa: ARG002 - of Recorder
        self.step_ends_s.append(asyncio.get_running_loop().time())

    def complete_oldest(self) -> None:
        pass

    def timed(self, name: str) -> AbstractContextManager[None]:  # noqa: ARG002
        return nullcontext()


class _Unlearned(StepRecord):
    """The record of a step from whose experience no metrics are computed."""

    @property
    def learning(self) -> dict[str, float]:  # type: ignore[override]
        return {}


@cache
def _prompts() -> PromptDataset:
    """Returns the prompts of every step: each has its number as its only token."""
    numbers = np.arange(_NUM_PROMPTS)
    tokens = Column(numbers.astype(np.int32), np.ones(_NUM_PROMPTS, np.int32))
    rows = tuple(PromptRow(_NOWHERE, "", SOURCE, None, {}) for _ in range(_NUM_PROMPTS))
    table = PromptBatch(numbers, tokens, ("",) * _NUM_PROMPTS, rows)
    return PromptDataset(table, _NUM_PROMPTS, seed=0, shuffle=False)


@cache
def _config(flow: Dataflow) -> Config:
    """Returns the configuration of a run with this dataflow that neither validates, saves nor records anything."""
    hosts = {"reference": flow.reference, "reward_model": flow.reward_model, "teacher": flow.teacher}
    rollout: dict[str, Any] = {
        "n": 1,
        "stream_groups": min(flow.num_parts, _NUM_PROMPTS),
        "staleness": flow.staleness,
        "check_freq": 0,
    }
    services = {"actor": {"devices": [0]}, "critic": {"devices": [1]}}
    if flow.rollout_share > 0.0:
        services["rollout"] = {"devices": [1 if flow.takes_turns else 2]}
        rollout["share"] = _with_a_prompt_each(flow.rollout_share)
    if "reward" in (flow.reward_model, flow.teacher):
        services["reward"] = {"devices": [3]}
    tree: dict[str, Any] = {
        "run": {
            "dir": _NOWHERE,
            "schedule": "serial" if flow.layout == "colocated" else flow.layout,
            "total_steps": _NUM_STEPS + flow.staleness,  # the last step samples for no next one
        },
        "data": {"train_files": _NOWHERE, "train_batch_size": _NUM_PROMPTS, "max_response_length": 1},
        "rollout": rollout,
        "algorithm": {
            "use_kl_in_reward": flow.reference is not None,
            "rollout_correction": {"bypass_mode": False, "rollout_is": "token" if flow.staleness else None},
        },
        # With two mini-batches the update needs old log-probs, which take 0 s where a run computes none.
        "actor": {"model": _NOWHERE, "ppo_mini_batch_size": _NUM_PROMPTS // 2},
        "reward_model": {"model": _NOWHERE} if flow.reward_model else {},
        "teacher": {"model": _NOWHERE} if flow.teacher else {},
        "placement": {name: host for name, host in hosts.items() if host is not None},
        "services": services,
        "evaluation": {"val_before_train": False},
        "checkpoint": {"save_freq": -1, "save_last": False},
        "tracking": {"trackers": [], "rollouts": {"enable": False}},
    }
    return validate(tree, "the planner")


def _with_a_prompt_each(rollout_share: float) -> float:
    """Returns a share with which both groups have a prompt of the few that there are, if both sample at all."""
    return 1.0 if rollout_share == 1.0 else min(max(rollout_share, 1 / _NUM_PROMPTS), 1.0 - 1 / _NUM_PROMPTS)
