"""The time of a step from the times of its phases: what waits for what, under each schedule (controller/trainer.py)."""

from collections.abc import Mapping
from dataclasses import dataclass
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
    phase_s: Mapping[str, float], idle_s: float, layout: Layout, reference: RoleName, *, num_parts: int = 1
) -> StepTime:
    """The steady state of `phase_s` (a phase that is absent takes no time), with `idle_s` in which nobody works.

        serial, colocated   the sum of all
        gather              generate + max(old [+ ref], values [+ ref] + reward model, score) + adv + max(updates)
        overlap             the same, but the critic's update only delays the critic's next values

    With `num_parts` parts of a streamed generation the critic, and the scores, begin with the first part.
    """
    at = {name: phase_s.get(name, 0.0) for name in ("gen", "ref", "score", "adv", "update_actor", "update_critic")}
    old, values = phase_s.get("old_log_prob", 0.0), phase_s.get("values", 0.0) + phase_s.get("reward_model", 0.0)
    on_actor, on_critic = (old + at["ref"], values) if reference == "actor" else (old, values + at["ref"])
    busy = {
        "actor": at["gen"] + on_actor + at["update_actor"],
        "critic": on_critic + at["update_critic"],
    }
    if layout in ("serial", "colocated"):
        step_s = sum(busy.values()) + at["score"] + at["adv"] + idle_s
        if layout == "colocated":
            return StepTime(step_s, {"all": 1.0 - sum(busy.values()) / step_s})
        return StepTime(step_s, _bubbles(busy, step_s))
    begins = ends = critic_free = 0.0
    for _ in range(_STEPS):
        begins = ends
        generated = begins + at["gen"]
        first_part = begins + at["gen"] / num_parts
        critic_done = max(generated + on_critic / num_parts, max(first_part, critic_free) + on_critic)
        scored = max(generated + at["score"] / num_parts, first_part + at["score"])
        updates = max(generated + on_actor, critic_done, scored) + at["adv"] + idle_s
        critic_free = updates + at["update_critic"]
        ends = updates + at["update_actor"]
        if layout == "gather":
            ends = critic_free = max(ends, critic_free)
    step_s = ends - begins
    return StepTime(step_s, _bubbles(busy, step_s))


def _bubbles(busy: Mapping[str, float], step_s: float) -> dict[str, float]:
    return {pool: max(0.0, 1.0 - seconds / step_s) for pool, seconds in busy.items()}
