"""How the prompts of a step are cut, and what waits for their responses."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np

from controller.rollout.stream import RolloutStream
from splitppo.batch import Batch
from splitppo.v1.batch_pb2 import SLOT_KIND_EXPERIENCE, Slot
from tests.fake_services import CallLog, FakeActor, make_config, make_table

PROMPTS = make_table().take(np.array([5, 3, 1, 0, 2]))


def make_stream(run_dir: Path, num_groups: int) -> RolloutStream:
    config = make_config(run_dir, rollout__stream_groups=num_groups)
    return RolloutStream(config, FakeActor(CallLog()), PROMPTS, step=3)


async def test_groups_are_neighbouring_prompts_in_order_as_equal_in_number_as_possible(tmp_path: Path) -> None:
    groups = make_stream(tmp_path, 2).groups
    assert [group.prompts.row_indices.tolist() for group in groups] == [[5, 3, 1], [0, 2]]
    assert [(group.slot.step, group.slot.part) for group in groups] == [(3, 1), (3, 2)]
    first = groups[0].prompts
    assert first.prompts.rows()[1].tolist() == PROMPTS.prompts.rows()[1].tolist()
    assert first.texts == PROMPTS.texts[:3]
    assert first.rows == PROMPTS.rows[:3]


async def test_one_group_is_the_whole_slot(tmp_path: Path) -> None:
    (group,) = make_stream(tmp_path, 1).groups
    assert group.slot == Slot(kind=SLOT_KIND_EXPERIENCE, step=3)
    assert group.prompts is PROMPTS


async def test_whoever_waits_for_rollouts_is_not_disturbed_by_others_that_give_up(
    tmp_path: Path,
) -> None:
    (group,) = make_stream(tmp_path, 1).groups
    patient, other = (asyncio.create_task(group.rollouts()) for _ in range(2))
    await asyncio.sleep(0)
    other.cancel()
    await asyncio.sleep(0)
    rollouts = Batch.from_rows(prompts=[[1]], responses=[[2]])
    group.fetched.set_result(rollouts)
    assert await patient is rollouts
    assert await group.rollouts() is rollouts
