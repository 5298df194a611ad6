"""The time of a step from the times of its phases: what waits for what, under each schedule (controller/trainer.py)."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

from splitppo.config import Schedule
from splitppo.config.section import RoleName

# One pool of devices for both models, one call after the other.
Layout = Schedule | Literal["colocated"]
# Steps until an overlapped critic's update has found its rhythm.
_STEPS = 8


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step, and the share of it in which each pool is idle."""

    step_s: float
    bubbles: Mapping[str, float]


def step_time(
    phase_s: Mapping[str, float],
    idle_s: float,
    layout: Layout,
    reference: RoleName,
    *,
    num_parts: int = 1,
    has_reward_group: bool = False,
) -> StepTime:
    """The steady state of `phase_s` (a phase that is absent takes no time), with `idle_s` in which nobody works.

        serial, colocated   the sum of all
        gather              generate + max(old [+ ref], values [+ ref] [+ reward model], scores) + adv + max(updates)
        overlap             the same, but the critic's update only delays the critic's next values

    The reward model is on the critic, or in a group of its own (`has_reward_group`), which computes beside the others.
    With `num_parts` parts of a streamed generation all but the actor begin with the first part.
    """
    at = defaultdict(float, phase_s)
    work = {"actor": at["old_log_prob"], "critic": at["values"], "reward": 0.0}  # between generation and updates
    work[reference] += at["ref"]
    work["reward" if has_reward_group else "critic"] += at["reward_model"]
    busy = {**work, "actor": work["actor"] + at["gen"] + at["update_actor"]}
    busy["critic"] += at["update_critic"]
    if not has_reward_group:
        del busy["reward"]
    if layout in ("serial", "colocated"):
        step_s = sum(busy.values()) + at["score"] + at["adv"] + idle_s
        if layout == "colocated":
            return StepTime(step_s, {"all": 1.0 - sum(busy.values()) / step_s})
        return StepTime(step_s, _bubbles(busy, step_s))
    generate, step_s, late_s = at["gen"], 0.0, 0.0
    after = partial(_after, generate, num_parts)
    for _ in range(_STEPS):
        computed = max(
            generate + work["actor"], after(work["critic"], late_s), after(work["reward"]), after(at["score"])
        )
        updates = computed + at["adv"] + idle_s
        critic_done = updates + at["update_critic"]
        step_s = updates + at["update_actor"]
        if layout == "gather":
            step_s = max(step_s, critic_done)
        late_s = max(0.0, critic_done - step_s)
    return StepTime(step_s, _bubbles(busy, step_s))


def _after(generate: float, num_parts: int, work: float, late_s: float = 0.0) -> float:
    """When work is done that begins with the first part of a generation, but not before `late_s`.

    The share of the last part is still to be done when generation ends.
    """
    return max(generate + work / num_parts, max(generate / num_parts, late_s) + work)


def _bubbles(busy: Mapping[str, float], step_s: float) -> dict[str, float]:
    return {pool: max(0.0, 1.0 - seconds / step_s) for pool, seconds in busy.items()}
