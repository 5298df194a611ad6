"""The cells of runs with a rollout group: it dies, or another process dies while the group samples or gets weights."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from tests.kill_matrix.cells import STEP, Cell
from tests.support.runs import STALE

# Two ranks, like the actor's: so the weights are those of a run in which the actor samples.
GROUP = ("services.rollout.num_processes=2", "services.rollout.threads=1")
# The group samples beside the update. It could not with a reward model in the critic's group, which scores before.
AHEAD = (*STALE, "run.total_steps=4", "reward_model.model=''")
# The actor's group samples, too; the rollout group is on the critic's core, and takes turns with the critic's group.
CORE = min(os.sched_getaffinity(0))
SHARED = (
    "rollout.share=0.5",
    "rollout.stream_groups=4",
    "services.rollout.num_processes=1",
    "services.rollout.threads=1",
    f"services.rollout.cpus={CORE}",
    f"services.critic.cpus={CORE}",
)
_SYNC, _PUBLISH = "rollout.sync_weights", "actor.publish_weights"
_SYNCED, _PUBLISHED = (f"controller.{point}.replied" for point in (_SYNC, _PUBLISH))


def rollout_group_cells(staleness: int) -> Iterable[Cell]:
    """All cells about the weights of step 2, and about the responses that are sampled with them.

    With `staleness` 1 these are the responses of step 4, which are sampled beside the update of step 3.
    """
    version, running = STEP, STEP + 1
    sampled = running + staleness
    kind, ending = (AHEAD, "_ahead") if staleness else ((), "")

    def cell(victim: str, moment: str, point: str, step: int, **others: Any) -> Cell:
        overrides = (*GROUP, *others.pop("overrides", ()))
        name = f"{moment}{ending}"
        return Cell(victim, name, point, step, kind=kind, overrides=overrides, **{"running": running, **others})

    def after(point: str, step: int = version) -> dict[str, Any]:
        return {"after": {"point": point, "step": step}}

    def generating(moment: str, settings: dict[str, Any], victim: str = "rollout_0", **others: Any) -> Cell:
        return cell(victim, moment, "rollout.generate", sampled, settings=settings, **others)

    yield cell("rollout_0", "sync_begin", f"{_SYNC}.begin", version)
    yield cell("rollout_1", "sync_half", _SYNC, version)
    yield cell("rollout_0", "sync_before_commit", _SYNC, version, settings={"hit": 2})
    yield cell("controller", "sync_replied", _SYNCED, version)
    yield generating("generating_first_token", after(_SYNCED))
    yield generating("generating", {"hit": 5}, "rollout_1")
    yield generating("writing_checkpoint", after("actor.save_checkpoint.writing"))
    yield generating("between_parts_of_commit", after("actor.save_checkpoint.durable"))
    # It has handed on all responses of the step that is saved.
    yield cell("rollout_0", "fetched", "controller.save_checkpoint.half", version, from_outside=True)
    for victim, moment, point, settings in (
        ("actor_0", "publish_begin", f"{_PUBLISH}.begin", {}),
        ("actor_1", "publish_half", _PUBLISH, {"hit": 5}),
        ("actor_0", "publish_before_manifest", f"{_PUBLISH}.before_manifest", {}),
        ("controller", "publish_replied", _PUBLISHED, {}),
    ):
        yield cell(victim, moment, point, version, settings=settings, running=version)
    yield cell("actor_0", "publish_replied", "actor.compute_log_probs", running, settings=after(_PUBLISHED))
    yield cell("controller", "sampling", "controller.rollout.generate", sampled, holds=("rollout.generate",))
    slow = ("services.progress_timeout_s=8",)
    yield generating("generating_frozen", {"hit": 3}, "rollout_1", action="stop", overrides=slow)
    yield cell("rollout_0", "sync_frozen", _SYNC, version, action="stop", overrides=slow)
    if not staleness:
        # The critic works on what was handed on already.
        yield cell(
            "rollout_0", "streaming", "rollout.generate.part", running, settings=after("critic.compute_values", running)
        )
        return
    beside = after("rollout.generate", sampled)
    # A newer version is there by now than the one that it needs again.
    yield generating("published", after(_PUBLISHED, running))
    yield cell("critic_0", "sampling", "critic.update.begin", running, settings=beside)
    yield generating(
        "with_actor_in_update",
        after("actor.update.begin", running),
        companion=cell("actor_0", "in_update", "actor.update.mini_batch", running, settings=beside),
    )


def share_cells(step: int = STEP) -> Iterable[Cell]:
    """All cells of runs in which both pools sample: about the rollouts of `step`, and about the turns of two groups."""
    actor, rollout, before = "actor.generate", "rollout.generate", step - 1
    overlap = ("run.schedule=overlap",)

    def cell(victim: str, moment: str, point: str, at: int = step, **others: Any) -> Cell:
        return Cell(victim, f"{moment}_shared", point, at, kind=SHARED, running=others.pop("running", step), **others)

    def after(point: str, hit: int = 1) -> dict[str, Any]:
        return {"settings": {"hit": hit, "after": {"point": point, "step": step}}}

    yield cell("rollout_0", "sync_half", _SYNC, before, **after(actor))
    yield cell("rollout_0", "generating", rollout, **after(actor, hit=3))
    yield cell("rollout_0", "streaming", f"{rollout}.part", **after(f"{actor}.part"))
    # The critic waits for its turn to work on the part of the actor.
    yield cell("rollout_0", "critic_waits", rollout, **after(f"{actor}.part", hit=3))
    slow = ("services.progress_timeout_s=8",)
    yield cell("rollout_0", "generating_frozen", rollout, **after(actor, hit=3), action="stop", overrides=slow)
    # Nobody needs the group before it has its turn again.
    yield cell("rollout_0", "turn_awaited", "critic.update", before, overrides=overlap, from_outside=True)
    yield cell("rollout_0", "turn_ended", "critic.compute_values", from_outside=True, running=step + 1)
    both = cell("actor_1", "both_generating", actor, **after(rollout, hit=3))
    yield cell("rollout_0", "both_generating", rollout, **after(actor, hit=3), companion=both)
    yield cell("actor_0", "generating", actor, **after(rollout, hit=3))
    yield cell("actor_1", "streaming", f"{actor}.part", **after(f"{rollout}.part"))
    yield cell("actor_0", "joined", "actor.compute_log_probs")
    yield cell("critic_0", "turn_awaited", "critic.update", before, overrides=overlap, **after(actor))
    yield cell("critic_0", "waits", rollout, from_outside=True)
    yield cell("critic_0", "turn_begun", "critic.compute_values")
    yield cell("controller", "generating", f"controller.{rollout}", holds=(rollout,))
    for victim, point in (("actor_0", actor), ("rollout_0", rollout)):
        validated = ("evaluation.val_before_train=true",)
        yield cell(victim, "validating", point, 0, overrides=validated, running=1)


ROLLOUT_GROUP_CELLS = (*rollout_group_cells(0), *rollout_group_cells(1), *share_cells())
