"""The cells of runs with partial rollouts: a process dies while responses of earlier steps are unfinished."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tests.kill_matrix.cells import Cell
from tests.kill_matrix.rollout_cells import GROUP

# A step samples its responses in several rounds, and later steps go on with what is unfinished then.
PARTIAL = (
    *("rollout.max_step_tokens=3", "rollout.stream_groups=1", "run.total_steps=4"),
    "algorithm.rollout_correction.rollout_is=token",
)
# No first round of a step has so many decoding steps on a rank, and all rounds together have more.
LATER_HIT = 14


def partial_cells_at(step: int) -> Iterable[Cell]:
    """All cells about partial rollouts, whose moments begin with `partial_`; they are in the work on `step`."""

    def cell(victim: str, moment: str, point: str, at: int = step, **others: Any) -> Cell:
        return Cell(victim, f"partial_{moment}", point, at, kind=PARTIAL, **others)

    def after(point: str, at: int = step) -> dict[str, Any]:
        return {"settings": {"after": {"point": point, "step": at}}}

    generate = "actor.generate"
    half = "controller.save_checkpoint.half"
    overlap = ("run.schedule=overlap",)
    yield cell("actor_1", "generating", generate, settings={"hit": 2})
    yield cell("actor_0", "later_round", generate, settings={"hit": LATER_HIT})
    yield cell("actor_1", "computing_log_probs", "actor.compute_log_probs")
    yield cell("actor_0", "between_mini_batches", "actor.update.mini_batch")
    yield cell("actor_1", "after_update_before_reply", "actor.update.committed")
    yield cell("actor_0", "writing_checkpoint", "actor.save_checkpoint.writing")
    yield cell(
        "actor_1", "between_parts_of_commit", "actor.save_checkpoint.writing", **after("critic.save_checkpoint.durable")
    )
    yield cell("critic_0", "generating", "critic.update", step - 1, overrides=overlap, **after(generate))
    yield cell("critic_0", "computing_values", "critic.compute_values")
    yield cell("critic_0", "between_mini_batches", "critic.update.mini_batch")
    yield cell("critic_0", "writing_checkpoint", "critic.save_checkpoint.writing")
    yield cell("controller", "generating", f"controller.{generate}", holds=(generate,))
    yield cell("controller", "before_update", "controller.actor.update.begin")
    yield cell("controller", "writing_checkpoint", "controller.save_checkpoint.writing")
    yield cell("controller", "between_parts_of_commit", half)
    # With a rollout group, which gets each version of the weights, and goes on with what older ones have begun.
    rollout = "rollout.generate"
    for victim, moment, point, others in (
        ("rollout_1", "generating", rollout, {"settings": {"hit": 2}}),
        ("rollout_0", "later_round", rollout, {"settings": {"hit": LATER_HIT}}),
        ("rollout_0", "sync_half", "rollout.sync_weights", {"at": step - 1, "running": step}),
        ("actor_0", "publish_begin", "actor.publish_weights.begin", {}),
        ("controller", "group_generating", f"controller.{rollout}", {"holds": (rollout,)}),
    ):
        yield cell(victim, moment, point, overrides=GROUP, **others)
