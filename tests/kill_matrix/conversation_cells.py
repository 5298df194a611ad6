"""The cells of runs whose responses are conversations: a process dies in a turn, or while a reply is on its way."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import yaml

from tests.kill_matrix.cells import STEP, Cell
from tests.kill_matrix.rollout_cells import SHARED
from tests.support import context_episodes, user_agents, user_environments
from tests.support.runs import STALE

# Three turns of at most six tokens, and what the environment says, also where it has no room in a context.
MAX_RESPONSE_LENGTH = 120
LIMITS = (
    f"data.max_response_length={MAX_RESPONSE_LENGTH}",
    "rollout.multi_turn.max_turn_length=6",
    "rollout.multi_turn.reply_steps=4",
)


def echo(name: str = "Echo", **kwargs: Any) -> str:
    """Returns the override by which all conversations of a run are with an `Echo`, or another of these environments."""
    return environment(path=user_environments.__file__, name=name, kwargs=kwargs)


def agent(name: str = "by_openai") -> str:
    """Returns the override by which all conversations of a run are with an agent, or with the same as a coroutine."""
    file = user_agents.__file__
    if name == "by_chat":
        return environment(path=file, name=name)
    if name in user_agents.PROGRAMS:
        return environment(command=[sys.executable, file, name], reward="output")
    return environment(agent=f"{file}:{name}")


def environment(**settings: Any) -> str:
    """Returns the override by which all conversations of a run are with this environment."""
    text = yaml.safe_dump({"default": settings}, default_flow_style=True, width=1000).strip()
    return f"rollout.multi_turn.environments={text}"


# Environments that are not deterministic. Without checkpoints, a recovery makes all steps again; no record goes.
RECORDED = (*LIMITS, echo("Dice", max_pause_s=0.02), "checkpoint.save_freq=-1", "checkpoint.save_last=false")
CONTEXTS = (
    *LIMITS,
    f"rollout.multi_turn.max_context_length={context_episodes.MAX_CONTEXT_LENGTH}",
    context_episodes.WITH_TEMPLATE,
)
# Half of them have several contexts.
TALKS = (*CONTEXTS, environment(path=context_episodes.__file__, name="converse"))
# The value model, on two ranks beside the reward model, reads a text before each of them.
PRIVILEGED = (*TALKS, "critic.privileged_prompt='letters {ground_truth}'", "services.critic.num_processes=2")
# It reads a number that each environment draws: the number is the same again only by the record.
PRIVILEGED_RECORDED = (*RECORDED, echo("Oracle", max_pause_s=0.02), "critic.privileged_prompt='{drawn}'")


def conversation_cells_at(step: int = STEP) -> Iterable[Cell]:
    """All cells about conversations of `step`: turns, what is computed of their contexts, and sampling ahead.

    In the last ones a rollout group answers half of the prompts, too.
    """

    def cell(victim: str, moment: str, point: str, at: int = step, hit: int = 1, **others: Any) -> Cell:
        settings = {"hit": hit, **others.pop("settings", {})}
        return Cell(victim, f"talk_{moment}", point, at, settings, kind=(*others.pop("kind", ()), *TALKS), **others)

    turn, reply = "actor.generate.turn", "actor.generate.reply"
    yield cell("actor_0", "in_turn", "actor.generate", hit=8)
    yield cell("actor_0", "turn_ended", turn, hit=2)
    yield cell("actor_1", "turn_ended", turn, hit=3)
    yield cell("actor_0", "reply_taken", reply)
    yield cell("actor_1", "reply_taken", reply, hit=2)
    waits = {"settings": {"after": {"point": turn, "step": step}}}
    yield cell("critic_0", "turn_ended", "critic.update", step - 1, overrides=("run.schedule=overlap",), **waits)
    yield cell("controller", "turn_ended", turn, from_outside=True)
    yield cell("controller", "reply_taken", reply, from_outside=True)
    yield cell("critic_0", "computing_values", "critic.compute_values")
    yield cell("actor_1", "between_mini_batches", "actor.update.mini_batch")
    yield cell("critic_0", "between_mini_batches", "critic.update.mini_batch")
    yield cell("controller", "turn_ended_ahead", turn, from_outside=True, kind=STALE)
    yield cell("rollout_0", "turn_ended_shared", "rollout.generate.turn", hit=2, kind=SHARED)
    yield cell("rollout_0", "reply_taken_shared", "rollout.generate.reply", hit=2, kind=SHARED)
    yield cell("actor_1", "reply_taken_shared", reply, hit=2, kind=SHARED)


def recorded_cells_at(step: int = STEP) -> Iterable[Cell]:
    """All cells of runs whose environments are not deterministic."""

    def cell(victim: str, moment: str, point: str, hit: int = 1, kind: tuple[str, ...] = (), **others: Any) -> Cell:
        others |= {"kind": (*kind, *RECORDED), "is_recorded": True}
        return Cell(victim, f"recorded_{moment}", point, step, {"hit": hit}, **others)

    turn = "actor.generate.turn"
    yield cell("actor_0", "turn_ended", turn, hit=3)
    yield cell("actor_1", "after_update_before_reply", "actor.update.committed")
    yield cell("critic_0", "between_mini_batches", "critic.update.mini_batch")
    yield cell("controller", "turn_ended", turn, from_outside=True)
    yield cell("controller", "after_update_before_reply", "actor.update.committed", from_outside=True)
    yield cell("controller", "turn_ended_ahead", turn, from_outside=True, kind=STALE)
    yield cell("rollout_0", "streaming_shared", "rollout.generate.part", kind=SHARED)


def privileged_cells_at(step: int = STEP) -> Iterable[Cell]:
    """All cells of runs whose critic reads more than the policy, also what an environment names for it alone."""

    def cell(victim: str, moment: str, point: str, at: int = step, **others: Any) -> Cell:
        return Cell(victim, f"privileged_{moment}", point, at, **{"kind": PRIVILEGED, **others})

    turn = "actor.generate.turn"
    outside = {"from_outside": True}
    recorded: dict[str, Any] = {"kind": PRIVILEGED_RECORDED, "is_recorded": True}
    waits = {"settings": {"after": {"point": turn, "step": step}}}
    yield cell("critic_1", "computing_values", "critic.compute_values")
    yield cell("critic_1", "between_mini_batches", "critic.update.mini_batch")
    yield cell("critic_0", "turn_ended", "critic.update", step - 1, overrides=("run.schedule=overlap",), **waits)
    yield cell("actor_0", "turn_ended", turn, settings={"hit": 2}, overrides=("run.schedule=serial",))
    yield cell("controller", "turn_ended", turn, **outside)
    yield cell("controller", "recorded_turn_ended", turn, **outside, **recorded)
    yield cell("critic_0", "recorded_between_mini_batches", "critic.update.mini_batch", **recorded)


def agent_cells_at(step: int = STEP) -> Iterable[Cell]:
    """All cells of agents that ask through the gateway and begin contexts: a function, and programs."""

    def cell(
        victim: str, moment: str, point: str, hit: int = 1, name: str = "by_openai", at: int = step, **others: Any
    ) -> Cell:
        kind = (*others.pop("kind", ()), *CONTEXTS, agent(name))
        what = "program" if name in user_agents.PROGRAMS else "agent"
        return Cell(
            victim, f"{what}_{moment}", point, at, {"hit": hit, **others.pop("settings", {})}, kind=kind, **others
        )

    turn, reply = "actor.generate.turn", "actor.generate.reply"
    outside = {"from_outside": True}
    # 0: the template, with which all its processes end; 1: one of these, with what runs in it.
    environments = {"title": "environments.process:serve", "ends_process": False, **outside}
    yield cell("environments_1", "turn_ended", turn, **environments)
    yield cell("actor_0", "turn_ended", turn, hit=3)
    yield cell("actor_1", "reply_taken", reply, hit=2)
    yield cell("controller", "turn_ended", turn, **outside)
    waits = {"settings": {"after": {"point": turn, "step": step}}}
    yield cell("critic_0", "turn_ended", "critic.update", at=step - 1, overrides=("run.schedule=overlap",), **waits)
    yield cell("critic_0", "computing_values", "critic.compute_values")
    yield cell("actor_1", "between_mini_batches", "actor.update.mini_batch")
    yield cell("critic_0", "between_mini_batches", "critic.update.mini_batch")
    yield cell("rollout_0", "turn_ended_shared", "rollout.generate.turn", hit=2, kind=SHARED)
    yield cell("environments_0", "turn_ended", turn, name="by_urllib", **environments)
    yield cell("controller", "turn_ended", turn, name="by_urllib", **outside)
    yield cell("actor_0", "reply_taken", reply, name="by_urllib")
