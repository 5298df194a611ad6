"""How the prompts of a step are cut, and what waits for their responses."""

from __future__ import annotations

import asyncio

import numpy as np

from controller.rollout_groups import cut_into_groups, whole_slot
from splitppo.batch import Batch
from tests.fake_services import make_table

PROMPTS = make_table().take(np.array([5, 3, 1, 0, 2]))


def test_groups_are_neighbouring_prompts_in_order_as_equal_in_number_as_possible() -> None:
    groups = cut_into_groups(PROMPTS, 2, step=3)
    assert [group.prompts.row_indices.tolist() for group in groups] == [[5, 3, 1], [0, 2]]
    assert [(group.slot.step, group.slot.part) for group in groups] == [(3, 1), (3, 2)]
    first = groups[0].prompts
    assert first.prompts.rows()[1].tolist() == PROMPTS.prompts.rows()[1].tolist()
    assert first.ground_truths == PROMPTS.ground_truths[:3]
    assert first.prompt_texts == PROMPTS.prompt_texts[:3]
    assert first.extra_infos == PROMPTS.extra_infos[:3]
    assert first.data_sources == PROMPTS.data_sources[:3]


def test_one_group_is_the_whole_slot() -> None:
    (group,) = cut_into_groups(PROMPTS, 1, step=3)
    assert group.slot == whole_slot(3)
    assert group.prompts is PROMPTS


async def test_whoever_waits_for_rollouts_is_not_disturbed_by_others_that_give_up() -> None:
    (group,) = cut_into_groups(PROMPTS, 1, step=3)
    patient, other = (asyncio.create_task(group.rollouts()) for _ in range(2))
    await asyncio.sleep(0)
    other.cancel()
    await asyncio.sleep(0)
    rollouts = Batch.from_rows(prompts=[[1]], responses=[[2]])
    group.arrive(rollouts)
    assert await patient is rollouts
    assert await group.rollouts() is rollouts
