"""Predicts the seconds of a training step from its phases, by the order of calls in controller/trainer.py."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from controller.commands.planner.measured import ENGINES
from controller.commands.planner.part_shares import part_shares
from splitppo.config import Schedule
from splitppo.config.section import RoleName

# "colocated": one pool of devices for both models, one call after the other.
Layout = Schedule | Literal["colocated"]
# After so many steps an overlapped update of the critic is in its steady state.
_STEPS = 6
# The numbers of the tasks that a task waits for.
_Numbers = tuple[int, ...]


@dataclass(frozen=True)
class StepTime:
    """The predicted seconds of a training step, and the idle share (0 to 1) of each pool of devices."""

    step_s: float
    bubbles: Mapping[str, float]


@dataclass(frozen=True)
class _Task:
    """One call of a step: `work` seconds in a pool of devices, which works on one call at a time; or a delay."""

    pool: str
    work: float
    after: _Numbers


def step_time(
    phase_s: Mapping[str, float],
    idle_s: float,
    layout: Layout,
    reference: RoleName,
    *,
    num_parts: int = 1,
    response_share: float = 0.0,
    reward_model: RoleName = "critic",
    teacher: RoleName = "critic",
    rollout_rows: float = 0.0,
    takes_turns: bool = False,
    staleness: int = 0,
    slowdown: float = 1.0,
) -> StepTime:
    """Predicts the seconds of a training step in the steady state, and the idle share of each pool of devices.

        serial, colocated   the sum of all
        gather              generate + max(old [+ ref], values [+ ref] [+ reward model], scores) + adv + max(updates)
        overlap             the same, but the critic's update only delays the critic's next values

    A rollout group adds publish, after the actor's update, and sync, before generate. If it samples beside the actor's
    group, generate is, with `late` for what the critic's update takes longer than the actor's update and publish:

        gather              max(actor's gen, sync + gen_rollout)
        overlap             the same, and on the critic's devices max(actor's gen, late + sync + gen_rollout)

    On the critic's devices all work of the critic's group begins after gen_rollout. With staleness 1 the group
    generates what the next step learns from, which is then scored, beside all other work:

        gather              max(sync + generate + max([reward model], scores),
                                max(old [+ ref], values [+ ref]) + adv + max(update_actor + publish, update_critic))

    If actor or critic take part in that, because the actor samples or the critic's group has the reward model, updates
    wait for its end.

    Args:
        phase_s: seconds of work of each phase; an absent phase takes 0 s.
        idle_s: seconds of a step in which no group works; they are added.
        layout: the schedule, or "colocated".
        reference: the host of the reference.
        num_parts: the parts of a streamed generation, of all groups that sample. All groups but the actor begin with
            the first part. A part ends when its share of the decoding is done, and has the share of tokens that
            `part_shares` gives.
        response_share: the share of response tokens in all tokens of a step.
        reward_model: the host of the reward model.
        teacher: the host of the teachers.
        rollout_rows: the share of the responses that a rollout group samples ("gen_rollout"); the actor's group samples
            the others ("gen").
        takes_turns: True if the rollout group has the critic's devices.
        staleness: `rollout.staleness`; with 1, a step generates and scores the responses of the next one.
        slowdown: the factor by which work of one of ENGINES takes longer while another one works, too.
    """
    at = defaultdict(float, phase_s)
    at["adv"] += idle_s
    frozen = {"ref": reference, "teacher": teacher, "reward_model": reward_model}
    hosts = {"old_log_prob": "actor", **frozen, "values": "critic", "score": ""}
    scoring = {name: hosts.pop(name) for name in ("reward_model", "score") if staleness and at[name]}
    takes_part = rollout_rows < 1.0 or {"actor", "critic"} & {*scoring.values()}
    rollout = "critic" if takes_turns else "rollout"
    samplers = (("actor", 0.0, at["gen"], 1.0 - rollout_rows), (rollout, at["sync"], at["gen_rollout"], rollout_rows))
    tasks: list[_Task] = []

    def add(pool: str, work: float, *after: int) -> int:
        in_turn = layout in ("serial", "colocated") and tasks
        tasks.append(_Task(pool, work, (len(tasks) - 1,) if in_turn else after))
        return len(tasks) - 1

    ends: list[_Numbers] = [()]
    for _ in range(_STEPS):
        parts: list[tuple[float, int, float]] = []  # (seconds until it ends, number, share of the tokens)
        sampled: list[int] = []  # the last part of each group
        for sampler, sync_s, gen_s, rows in samplers:
            if rows == 0.0:
                continue
            last = add(sampler, sync_s, *ends[-1])
            ended_s = sync_s
            own_parts = max(1, round(num_parts * rows))
            for share, work in zip(part_shares(own_parts), part_shares(own_parts, response_share), strict=True):
                last = add(sampler, gen_s * share, last)
                ended_s = ended_s + gen_s * share
                parts.append((ended_s, last, rows * work))
            sampled.append(last)
        whole = ends[-1] if staleness else sampled
        computed = [add("actor", at[name], *whole) for name, pool in hosts.items() if pool == "actor"]
        for _, part, share in sorted(parts):
            after = ends[-1] if staleness else (part,)
            computed += [add(pool, at[name] * share, *after) for name, pool in hosts.items() if pool != "actor"]
        scored = [add(pool, at[name], *sampled) for name, pool in scoring.items()]
        ready = (add("", at["adv"], *computed), *((*sampled, *scored) if takes_part else ()))
        actor = add("actor", at["update_actor"], *ready)
        critic = add("critic", at["update_critic"], *ready)
        done = (*sampled, *scored, add("actor", at["publish"], actor))
        ends.append(done if layout == "overlap" else (*done, critic))
    started, ended = _run(tasks, slowdown)
    begin_s, end_s = (max(ended[number] for number in numbers) for numbers in ends[-2:])
    step_s = end_s - begin_s
    last = len(tasks) - len(tasks) // _STEPS
    busy: dict[str, float] = defaultdict(float)
    for number, task in enumerate(tasks[last:], start=last):
        busy[task.pool] += ended[number] - started[number]
    if layout == "colocated":
        busy["all"] = busy["actor"] + busy["critic"]
    pools = ["all"] if layout == "colocated" else ["actor", "critic"]
    pools += ["reward"] * ("reward" in (reward_model, teacher)) + ["rollout"] * (rollout_rows > 0.0 and not takes_turns)
    return StepTime(step_s, {pool: max(0.0, 1.0 - busy[pool] / step_s) for pool in pools})


def _run(tasks: Sequence[_Task], slowdown: float) -> tuple[list[float], list[float]]:
    """Simulates the tasks on their pools; returns (start, end) of each, in seconds from the start of the first."""
    left = [task.work for task in tasks]
    started = [-1.0] * len(tasks)
    ended = [-1.0] * len(tasks)
    waiting = list(range(len(tasks)))
    now = 0.0
    while waiting:
        # A pool works on its first task alone, also while this task waits; delays need no pool.
        first = {tasks[number].pool or number: number for number in reversed(waiting)}
        ready = [number for number in first.values() if all(ended[other] >= 0.0 for other in tasks[number].after)]
        busy = ENGINES & {tasks[number].pool for number in ready if left[number] > 0.0}
        slowed = busy if len(busy) > 1 else ()
        rates = {number: 1.0 / slowdown if tasks[number].pool in slowed else 1.0 for number in ready}
        step_s = min(left[number] / rate for number, rate in rates.items())
        for number, rate in rates.items():
            started[number] = now if started[number] < 0.0 else started[number]
            left[number] -= step_s * rate
            if left[number] <= 1e-12:
                ended[number] = now + step_s
        now += step_s
        waiting = [number for number in waiting if ended[number] < 0.0]
    return started, ended
