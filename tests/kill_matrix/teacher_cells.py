"""The cells of runs with a teacher: a process dies in the teacher's work, or in an update that learns from it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tests.kill_matrix.cells import Cell

# The weight of the signal moves from step to step, so that a run which forgets it ends with other weights.
CONTROL = ("teacher.coef=0.5", "teacher.kl_ctrl=adaptive", "teacher.kl_target=0.001", "teacher.kl_horizon=200")
TEACHER = ("teacher.model={models}/teacher", *CONTROL)
ON_ACTOR = (*TEACHER, "placement.teacher=actor")
TOP_K = (*TEACHER, "teacher.signal=top_k", "teacher.top_k=4")
_COMPUTE = "compute_teacher_log_probs"


def teacher_cells_at(step: int) -> Iterable[Cell]:
    """All cells about teachers, whose moments begin with `teacher_`."""

    def cell(victim: str, moment: str, point: str, kind: tuple[str, ...] = TEACHER, **others: Any) -> Cell:
        return Cell(victim, f"teacher_{moment}", point, step, kind=kind, **others)

    # On a group of its own it computes the bits that it computes on the critic's.
    own_group = ("placement.teacher=reward", "run.schedule=overlap")
    yield cell("critic_0", "computing", f"critic.{_COMPUTE}")
    yield cell("critic_0", "computing_second_part", f"critic.{_COMPUTE}", settings={"hit": 2})
    yield cell("reward_0", "computing", f"reward.{_COMPUTE}", overrides=own_group)
    yield cell("controller", "computing", f"critic.{_COMPUTE}", from_outside=True)
    yield cell("actor_1", "computing", f"actor.{_COMPUTE}", ON_ACTOR)
    yield cell("actor_1", "between_mini_batches", "actor.update.mini_batch", TOP_K)
    yield cell("actor_0", "after_update_before_reply", "actor.update.committed", TOP_K)
    yield cell("critic_0", "computing_top_k", f"critic.{_COMPUTE}", TOP_K)
