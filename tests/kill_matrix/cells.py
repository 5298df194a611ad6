"""The cells of the matrix: a process and a point at which it dies, a failpoint (splitppo/config/sections/debug.py)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

# The step in which the process dies; a step before it and one after it are undisturbed.
STEP = 2
# Four ranks hold the policy twice; neighbours divide a copy between them.
MESH = ("services.actor.num_processes=4", "actor.fsdp_size=2")
DDP = ("services.actor.num_processes=2", "actor.strategy=ddp")


@dataclass(frozen=True)
class Cell:
    """One incident.

    Attributes:
        victim: "actor_0" is rank 0 of the actor.
        moment: its name in the table.
        point: the failpoint.
        step: in whose work it happens, as the failpoint counts.
        settings: of the failpoint, besides rank and step.
        overrides: key.path=value that the run needs to come to this moment.
        action: what the failpoint does.
        ends_process: whether the victim's process must be started again.
        holds: points at which another process waits until this one has passed its point: the moment cannot pass
            unnoticed.
        kind: key.path=value of a run that is undisturbed otherwise, if it ends with weights of its own.
        from_outside: the process works on something else, or on nothing, when the point is passed: it is killed by pid.
        companion: an incident of the same moment.
        running: the step of the run that waits for the recovery; 0: `step`.
        title: what the command line of the victim begins with or has in it, if no rank or controller dies. It is killed
            by pid, with an empty `point` as soon as it is there.
        is_recorded: no two runs of its kind end alike, unless one replays what the other one has recorded.
    """

    victim: str
    moment: str
    point: str
    step: int = STEP
    settings: dict[str, Any] = field(default_factory=dict)
    overrides: tuple[str, ...] = ()
    action: str = "kill"
    ends_process: bool = True
    holds: tuple[str, ...] = ()
    kind: tuple[str, ...] = ()
    from_outside: bool = False
    companion: Cell | None = None
    running: int = 0
    is_recorded: bool = False
    title: str = ""

    @property
    def name(self) -> str:
        return f"{self.victim}-{self.moment}"

    @property
    def role(self) -> str:
        """The role whose process it is: actor, critic, reward, rollout or controller."""
        return self.victim.partition("_")[0]

    @property
    def rank(self) -> int:
        number = self.victim.partition("_")[2]
        return int(number) if number.isdigit() else 0

    @property
    def incidents(self) -> tuple[Cell, ...]:
        """This incident, and the one that happens with it."""
        return (self,) if self.companion is None else (self, self.companion)

    @property
    def failpoints(self) -> Iterable[tuple[str, dict[str, Any]]]:
        """By point; the victim's own first."""
        if not self.point:
            return
        if self.from_outside:  # the process that passes the point leaves a mark, and waits for nothing
            yield self.point, {"step": self.step, "action": "wait", "after": {"point": self.point, "step": self.step}}
            return
        yield self.point, {"step": self.step, **self.settings, "rank": self.rank, "action": self.action}
        for point in self.holds:
            yield point, {"step": self.step, "action": "wait", "after": {"point": self.point, "step": self.step}}


def debug(cells: Iterable[Cell]) -> dict[str, Any]:
    """The section `debug` of a run in which all of them happen."""
    failpoints: dict[str, list[dict[str, Any]]] = {}
    for cell in cells:
        for point, failpoint in cell.failpoints:
            failpoints.setdefault(point, []).append(failpoint)
    return {"failpoints": failpoints}


def cells_at(step: int) -> dict[str, Cell]:
    """All cells of runs without frozen models, by name, in which a process dies in the work on `step`."""

    def after(point: str) -> dict[str, Any]:
        """The victim waits at its point until another process has passed `point` in the same step."""
        return {"after": {"point": point, "step": step}}

    def cell(victim: str, moment: str, point: str, settings: dict[str, Any] | None = None, **others: Any) -> Cell:
        return Cell(victim, moment, point, **{"step": step, "settings": settings or {}, **others})

    def of_role(victim: str, role: str, other: str) -> list[Cell]:
        return [
            cell(victim, "before_update", f"{role}.update.begin"),
            cell(victim, "between_mini_batches", f"{role}.update.mini_batch"),
            cell(victim, "after_update_before_reply", f"{role}.update.committed"),
            cell(victim, "writing_checkpoint", f"{role}.save_checkpoint.writing"),
            cell(
                victim,
                "between_parts_of_commit",
                f"{role}.save_checkpoint.writing",
                after(f"{other}.save_checkpoint.durable"),
            ),
        ]

    def of_actor(victim: str) -> list[Cell]:
        return [
            cell(victim, "generating", "actor.generate", {"hit": 2}),
            # The critic works on what was handed on already.
            cell(victim, "streaming", "actor.generate.part", after("critic.compute_values")),
            cell(victim, "computing_values", "actor.compute_log_probs", after("critic.compute_values")),
            *of_role(victim, "actor", "critic"),
        ]

    def of_critic(victim: str) -> list[Cell]:
        # The critic works while the actor generates only under this schedule: it updates for the step before.
        while_generating = {"overrides": ("run.schedule=overlap",), "step": step - 1}
        return [
            cell(
                victim,
                "generating",
                "critic.update",
                {"after": {"point": "actor.generate", "step": step}},
                **while_generating,
            ),
            cell(victim, "computing_values", "critic.compute_values"),
            *of_role(victim, "critic", "actor"),
        ]

    def of_controller(victim: str) -> list[Cell]:
        actor, critic = "controller.actor", "controller.critic"
        return [
            cell(victim, "generating", f"{actor}.generate", holds=("actor.generate",)),
            cell(victim, "computing_values", f"{critic}.compute_values", holds=("critic.compute_values",)),
            cell(victim, "before_update", f"{actor}.update.begin"),
            *(
                cell(victim, moment, f"{actor}.update", after(point), holds=(point,))
                for moment, point in (
                    ("between_mini_batches", "actor.update.mini_batch"),
                    ("after_update_before_reply", "actor.update.committed"),
                )
            ),
            cell(victim, "writing_checkpoint", "controller.save_checkpoint.writing"),
            cell(victim, "between_parts_of_commit", "controller.save_checkpoint.half"),
        ]

    found = (*of_actor("actor_0"), *of_actor("actor_1"), *of_critic("critic_0"), *of_controller("controller"))
    return {cell.name: cell for cell in found}


def frozen_model_cells_at(step: int) -> dict[str, Cell]:
    """Those in which a process dies that holds a frozen model; the reward group's only work is scoring.

    Under `overlap` the reward group scores the responses of a step while the critic still learns from the step before,
    and while the pair of that step is saved: it dies in its scoring once another process has come to the moment.
    """
    before = step - 1
    moments = {
        "generating": ("actor.generate", step),
        "computing_values": ("critic.compute_values", step),
        "before_update": ("critic.update.begin", before),
        "between_mini_batches": ("critic.update.mini_batch", before),
        "after_update_before_reply": ("critic.update.committed", before),
        "writing_checkpoint": ("actor.save_checkpoint.writing", before),
        "between_parts_of_commit": ("actor.save_checkpoint.durable", before),
    }
    of_reward_group = [
        Cell(
            "reward_0",
            moment,
            "reward.compute_reward_scores",
            step,
            {"after": {"point": point, "step": step_of_others}},
            overrides=("run.schedule=overlap", "placement.reward_model=reward"),
        )
        for moment, (point, step_of_others) in moments.items()
    ]
    on_critic = [
        Cell("critic_0", "computing_reward_scores", "critic.compute_reward_scores", step),
        Cell(
            "critic_0",
            "computing_ref_log_probs",
            "critic.compute_ref_log_probs",
            step,
            overrides=("placement.reference=critic",),
        ),
    ]
    return {cell.name: cell for cell in (*of_reward_group, *on_critic)}


def mesh_cells_at(step: int) -> Iterable[Cell]:
    """Those of runs whose actor is a mesh with replicas, or holds whole weights: a rank of either copy dies."""

    def cell(victim: str, moment: str, point: str, kind: tuple[str, ...] = MESH, **settings: Any) -> Cell:
        return Cell(victim, moment, f"actor.{point}", step, settings, kind=kind)

    yield cell("actor_1", "mesh_generating", "generate", hit=2)
    yield cell("actor_2", "mesh_computing_log_probs", "compute_log_probs")
    yield cell("actor_3", "mesh_between_mini_batches", "update.mini_batch")
    yield cell("actor_0", "mesh_after_update_before_reply", "update.committed")
    yield cell("actor_3", "mesh_writing_checkpoint", "save_checkpoint.writing")
    durable = {"point": "critic.save_checkpoint.durable", "step": step}
    yield cell("actor_2", "mesh_between_parts_of_commit", "save_checkpoint.writing", after=durable)
    yield cell("actor_1", "mesh_ddp_between_mini_batches", "update.mini_batch", DDP)
    yield cell("actor_1", "mesh_ddp_writing_checkpoint", "save_checkpoint.writing", DDP)
