"""Shares of the prompts: the lengths of the prompts and the share alone say which group answers which prompt."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.sampling.stream import Asked, SamplingGroups, Share, deal, goes_to_rollout_group
from controller.workers.worker_groups import Workers
from splitppo.batch import Batch
from splitppo.v1.actor_pb2 import SamplingParams
from splitppo.v1.batch_pb2 import (
    SLOT_KIND_CANDIDATES,
    SLOT_KIND_EVALUATION,
    SLOT_KIND_EXPERIENCE,
    SLOT_KIND_GREEDY,
    SLOT_KIND_SHARE,
    Slot,
)
from tests.support.call_log import CallLog
from tests.support.fake_rollout import FakeRollout
from tests.support.fake_services import FakeActor, make_config, make_table

CONFIG = make_config(Path("run"), services__rollout={})
LENGTHS = st.lists(st.integers(0, 8), min_size=1, max_size=40)
SHARES = st.floats(0.0, 1.0) | st.sampled_from([0.0, 0.1, 1 / 3, 0.5, 2 / 3, 1.0])
STEP = Slot(kind=SLOT_KIND_EXPERIENCE, step=7)


def chosen(lengths: list[int], share: float) -> list[bool]:
    return goes_to_rollout_group(np.array(lengths, np.int32), share).tolist()


def groups_of(share: float, *, has_rollout: bool = True) -> SamplingGroups:
    log = CallLog()
    config = CONFIG.changed("rollout", {"share": share})
    rollout = FakeRollout(log) if has_rollout else None
    return SamplingGroups.of(config, Workers.of(config, FakeActor(log), None, rollout=rollout))


def asked_of(seeded: Batch, slot: Slot, num_parts: int = 1) -> Asked:
    return Asked(make_table(1), seeded, version=6, params=SamplingParams(), slot=slot, num_parts=num_parts)


def prompts_of(lengths: list[int], num_samples: int) -> Batch:
    """The prompts with seeds that are all different."""
    seeds = np.arange(len(lengths) * num_samples).reshape(-1, num_samples)
    return Batch.from_rows(prompts=[[1] * length for length in lengths], seeds=seeds.tolist())


def deal_by_role(share: float, seeded: Batch, slot: Slot = STEP, num_parts: int = 1) -> dict[str, Share]:
    return {part.client.role: part for part in deal(groups_of(share), asked_of(seeded, slot, num_parts))}


@given(LENGTHS, SHARES)
def test_each_group_gets_its_share_of_long_and_of_short_prompts(lengths: list[int], share: float) -> None:
    longest_first = sorted(range(len(lengths)), key=lambda prompt: -lengths[prompt])
    goes = [chosen(lengths, share)[prompt] for prompt in longest_first]
    assert goes == [math.floor((i + 1) * share) > math.floor(i * share) for i in range(len(lengths))]
    assert sum(goes) == math.floor(len(lengths) * share)
    for start in range(len(goes)):  # also of any prompts of similar length
        assert abs(sum(goes[start:]) - share * (len(goes) - start)) < 1 + 1e-9


@given(st.permutations(range(1, 12)), SHARES)
def test_a_prompt_has_the_same_group_wherever_it_stands(lengths: list[int], share: float) -> None:
    in_order = dict(zip(range(1, 12), chosen([*range(1, 12)], share), strict=True))
    assert chosen(lengths, share) == [in_order[length] for length in lengths]


@given(LENGTHS, SHARES, st.integers(1, 3), st.data())
def test_every_response_is_sampled_once_beside_the_others_to_its_prompt(
    lengths: list[int], share: float, num_samples: int, data: st.DataObject
) -> None:
    seeded = prompts_of(lengths, num_samples)
    num_parts = data.draw(st.integers(1, seeded.num_rows * num_samples))
    dealt = deal_by_role(share, seeded, num_parts=num_parts)
    places = {role: part.places.reshape(-1, num_samples) for role, part in dealt.items()}
    assert sorted(np.concatenate([rows.reshape(-1) for rows in places.values()])) == [
        *range(len(lengths) * num_samples)
    ]
    for role, part in dealt.items():
        assert (np.diff(part.places) > 0).all()
        prompts = places[role][:, 0] // num_samples
        assert (places[role] // num_samples == prompts[:, None]).all()
        assert (np.array(chosen(lengths, share))[prompts] == (role == "rollout")).all()
        assert np.array_equal(np.array(part.seeded["seeds"].rows()), places[role])  # seed i belongs to response i
        assert part.seeded["prompts"].lengths.tolist() == [lengths[prompt] for prompt in prompts]
        assert 1 <= part.num_parts <= len(part.places)
        assert part.slot == Slot(kind=SLOT_KIND_SHARE if len(dealt) == 2 else SLOT_KIND_EXPERIENCE, step=7)
    assert abs(sum(part.num_parts for part in dealt.values()) - num_parts) <= 1
    assert again(dealt) == again(deal_by_role(share, seeded, num_parts=num_parts))


def again(dealt: dict[str, Share]) -> dict[str, Any]:
    return {role: (part.places.tolist(), part.num_parts) for role, part in dealt.items()}


@given(LENGTHS)
def test_a_share_of_0_or_1_leaves_one_group_that_has_the_slot_of_the_step(lengths: list[int]) -> None:
    for share, role in ((0.0, "actor"), (1.0, "rollout")):
        (part,) = deal(groups_of(share), asked_of(prompts_of(lengths, 2), STEP, 2))
        assert (part.client.role, part.slot, part.num_parts) == (role, STEP, 2)


@pytest.mark.parametrize(("share", "role"), [(0.0, "actor"), (0.5, "actor"), (0.99, "actor"), (1.0, "rollout")])
def test_a_single_prompt_is_the_actors_unless_the_rollout_group_has_all(share: float, role: str) -> None:
    assert deal_by_role(share, prompts_of([3], 4), num_parts=3).keys() == {role}


def test_without_a_rollout_group_the_actor_has_all() -> None:
    groups = groups_of(0.5, has_rollout=False)
    (part,) = deal(groups, asked_of(prompts_of([3, 1, 2], 2), STEP))
    assert (part.client, part.places.tolist(), part.slot) == (groups.actor, [*range(6)], STEP)


@pytest.mark.parametrize("kind", [SLOT_KIND_CANDIDATES, SLOT_KIND_EVALUATION, SLOT_KIND_GREEDY])
def test_what_is_not_put_to_the_actor_stays_in_its_own_slot_in_both_groups(kind: Any) -> None:
    slot = Slot(kind=kind, step=7, part=2)
    assert [part.slot for part in deal_by_role(0.5, prompts_of([3, 1, 2], 2), slot).values()] == [slot, slot]
