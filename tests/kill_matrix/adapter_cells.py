"""The cells of runs that train adapters: those of other runs, at the moments at which the work is another one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from tests.kill_matrix.cells import MESH, Cell, cells_at, mesh_cells_at
from tests.kill_matrix.rollout_cells import GROUP, rollout_group_cells

# The reference is the policy without its adapters; the frozen weights of the critic are in bf16.
LORA = (
    *("actor.lora_rank=4", "actor.lora_alpha=4", "actor.lr=1e-2"),
    *("critic.lora_rank=4", "critic.lora_alpha=4", "critic.lr=1e-2", "critic.dtype=bf16"),
)
_MOMENTS = (
    "actor_1-between_mini_batches",
    "actor_0-after_update_before_reply",
    "actor_0-writing_checkpoint",
    "actor_1-between_parts_of_commit",
    "critic_0-between_mini_batches",
    "critic_0-writing_checkpoint",
    "controller-between_parts_of_commit",
)
_MOMENTS_OF_ROLLOUT_GROUP = (
    "rollout_1-sync_half",
    "rollout_1-generating",
    "actor_1-publish_half",
    "actor_0-publish_before_manifest",
)


def adapter_cells_at(step: int) -> Iterable[Cell]:
    """All cells about adapters, whose moments begin with `lora_`; a rollout group samples with merged weights."""
    reference = Cell("actor_0", "computing_ref_log_probs", "actor.compute_ref_log_probs", step)
    alone, on_mesh = cells_at(step), {cell.name: cell for cell in mesh_cells_at(step)}
    beside = {cell.name: cell for cell in rollout_group_cells(0)}
    chosen = (
        *((cell, LORA) for cell in (reference, *map(alone.__getitem__, _MOMENTS))),
        *((beside[name], (*GROUP, *LORA)) for name in _MOMENTS_OF_ROLLOUT_GROUP),
        (on_mesh["actor_3-mesh_writing_checkpoint"], (*MESH, *LORA)),
    )
    for cell, kind in chosen:
        yield replace(cell, moment=f"lora_{cell.moment}", kind=kind)
