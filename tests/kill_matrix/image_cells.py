"""The cells of runs whose prompts have images: a process dies in work on images, or while they are sent."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tests.kill_matrix.cells import Cell
from tests.kill_matrix.rollout_cells import GROUP
from tests.support.image_runs import MAX_PROMPT_LENGTH, MODEL, TRAIN, VAL
from tests.support.runs import STALE

# A reward model would read the text alone.
WITH_IMAGES = (
    *(f"{role}.model={{models}}/{MODEL}" for role in ("actor", "critic")),
    *(f"data.train_files={{models}}/{TRAIN}", f"data.val_files={{models}}/{VAL}"),
    *(f"data.max_prompt_length={MAX_PROMPT_LENGTH}", "reward_model.model=''"),
)
# A checkpoint names the images of the rollouts that it stores.
AHEAD = (*WITH_IMAGES, *STALE)


def image_cells_at(step: int) -> Iterable[Cell]:
    """All cells about images, whose moments begin with `images_`."""

    def cell(victim: str, moment: str, point: str, kind: tuple[str, ...] = WITH_IMAGES, **others: Any) -> Cell:
        return Cell(victim, f"images_{moment}", point, others.pop("at", step), kind=kind, **others)

    generate = "actor.generate"
    yield cell("actor_1", "generating", generate, settings={"hit": 2})
    yield cell("actor_1", "computing_log_probs", "actor.compute_log_probs")
    yield cell("actor_0", "between_mini_batches", "actor.update.mini_batch")
    yield cell("actor_1", "after_update_before_reply", "actor.update.committed")
    yield cell("actor_0", "writing_checkpoint", "actor.save_checkpoint.writing")
    yield cell("critic_0", "computing_values", "critic.compute_values")
    yield cell("critic_0", "between_mini_batches", "critic.update.mini_batch")
    yield cell("controller", "generating", f"controller.{generate}", holds=(generate,))
    yield cell("controller", "before_update", "controller.actor.update.begin")
    yield cell("actor_0", "ahead_between_mini_batches", "actor.update.mini_batch", AHEAD)
    yield cell("critic_0", "ahead_computing_values", "critic.compute_values", AHEAD)
    yield cell("controller", "ahead_between_parts_of_commit", "controller.save_checkpoint.half", AHEAD)
    yield cell("rollout_1", "generating", "rollout.generate", overrides=GROUP, settings={"hit": 2})
