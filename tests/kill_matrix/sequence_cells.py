"""The cells of runs whose ranks divide the positions of rows: a rank with results of a group dies, or one without."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tests.kill_matrix.cells import Cell

# Two times two actor ranks, beside the reference, and two critic ranks, beside a reward model.
TOGETHER = (
    *("services.actor.num_processes=4", "actor.ulysses_sequence_parallel_size=2"),
    *("services.critic.num_processes=2", "critic.ulysses_sequence_parallel_size=2"),
)
# Each pair holds whole weights; attention is not computed again in the backward pass.
DDP = (*TOGETHER, "actor.strategy=ddp", "actor.gradient_checkpointing=selective")


def sequence_cells_at(step: int) -> Iterable[Cell]:
    """All cells about divided positions, whose moments begin with `sequence_`: ranks 1 and 3 have no results."""

    def cell(victim: str, moment: str, point: str, kind: tuple[str, ...] = TOGETHER, **settings: Any) -> Cell:
        role = victim.partition("_")[0]
        return Cell(victim, f"sequence_{moment}", f"{role}.{point}", step, settings, kind=kind)

    yield cell("actor_1", "generating", "generate", hit=2)
    yield cell("actor_3", "computing_log_probs", "compute_log_probs")
    yield cell("actor_2", "computing_ref_log_probs", "compute_ref_log_probs")
    yield cell("actor_3", "between_mini_batches", "update.mini_batch")
    yield cell("actor_0", "after_update_before_reply", "update.committed")
    yield cell("actor_3", "writing_checkpoint", "save_checkpoint.writing")
    durable = {"point": "critic.save_checkpoint.durable", "step": step}
    yield cell("actor_1", "between_parts_of_commit", "save_checkpoint.writing", after=durable)
    yield cell("critic_1", "computing_reward_scores", "compute_reward_scores")
    yield cell("critic_1", "computing_values", "compute_values")
    yield cell("critic_0", "between_mini_batches", "update.mini_batch")
    yield cell("actor_3", "ddp_between_mini_batches", "update.mini_batch", DDP)
    yield cell("actor_2", "ddp_writing_checkpoint", "save_checkpoint.writing", DDP)
