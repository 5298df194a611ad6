"""The cells of the matrix: which process dies, and where; each is a failpoint (splitppo/config/debug.py)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

# The step in which the process dies; a step before it and one after it are undisturbed.
STEP = 2
VICTIMS = ("actor_0", "actor_1", "critic_0", "controller")
MOMENTS = (
    "generating",
    "computing_values",
    "before_update",
    "between_mini_batches",
    "after_update_before_reply",
    "writing_checkpoint",
    "between_parts_of_commit",
)


@dataclass(frozen=True)
class Cell:
    """One kill.

    Attributes:
        victim: "actor_0" is rank 0 of the actor.
        moment: one of MOMENTS.
        point: the failpoint.
        settings: of the failpoint, besides the rank.
        overrides: key.path=value that the run needs to come to this moment.
        action: what the failpoint does.
    """

    victim: str
    moment: str
    point: str
    settings: dict[str, Any] = field(default_factory=dict)
    overrides: tuple[str, ...] = ()
    action: str = "kill"

    @property
    def name(self) -> str:
        return f"{self.victim}-{self.moment}"

    @property
    def role(self) -> str:
        """The role whose process dies: actor, critic or controller."""
        return self.victim.partition("_")[0]

    @property
    def debug(self) -> dict[str, Any]:
        """The section `debug` of the run."""
        rank = int(self.victim.partition("_")[2] or 0)
        return {"failpoints": {self.point: {"step": STEP, **self.settings, "rank": rank, "action": self.action}}}


def _after(point: str) -> dict[str, Any]:
    """The victim waits at its point until another process has passed `point` in the same step."""
    return {"after": {"point": point, "step": STEP}}


def _cells_of_actor(victim: str) -> list[Cell]:
    return [
        Cell(victim, "generating", "actor.generate", {"hit": 2}),
        Cell(victim, "computing_values", "actor.compute_log_probs", _after("critic.compute_values")),
        Cell(victim, "before_update", "actor.update.begin"),
        Cell(victim, "between_mini_batches", "actor.update.mini_batch"),
        Cell(victim, "after_update_before_reply", "actor.update.committed"),
        Cell(victim, "writing_checkpoint", "actor.save_checkpoint.writing"),
        Cell(
            victim, "between_parts_of_commit", "actor.save_checkpoint.writing", _after("critic.save_checkpoint.durable")
        ),
    ]


def _cells_of_critic(victim: str) -> list[Cell]:
    while_generating = {"step": STEP - 1, **_after("actor.generate")}
    return [
        # The critic works while the actor generates only under this schedule: it updates for the step before.
        Cell(victim, "generating", "critic.update", while_generating, ("run.schedule=overlap",)),
        Cell(victim, "computing_values", "critic.compute_values"),
        Cell(victim, "before_update", "critic.update.begin"),
        Cell(victim, "between_mini_batches", "critic.update.mini_batch"),
        Cell(victim, "after_update_before_reply", "critic.update.committed"),
        Cell(victim, "writing_checkpoint", "critic.save_checkpoint.writing"),
        Cell(
            victim, "between_parts_of_commit", "critic.save_checkpoint.writing", _after("actor.save_checkpoint.durable")
        ),
    ]


def _cells_of_controller(victim: str) -> list[Cell]:
    return [
        Cell(victim, "generating", "controller.actor.generate"),
        Cell(victim, "computing_values", "controller.critic.compute_values"),
        Cell(victim, "before_update", "controller.actor.update.begin"),
        Cell(victim, "between_mini_batches", "controller.actor.update", _after("actor.update.mini_batch")),
        Cell(victim, "after_update_before_reply", "controller.actor.update", _after("actor.update.committed")),
        Cell(victim, "writing_checkpoint", "controller.save_checkpoint.writing"),
        Cell(victim, "between_parts_of_commit", "controller.save_checkpoint.half"),
    ]


CELLS = (
    *_cells_of_actor("actor_0"),
    *_cells_of_actor("actor_1"),
    *_cells_of_critic("critic_0"),
    *_cells_of_controller("controller"),
)
