"""The parts of a step's responses: their rows, the calls that wait for them, and the order of the prompts."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from controller.step.context import StepContext
from controller.step.generation import SampledRollouts
from controller.step.log_prob_check import LogProbCheck
from controller.step.parts import RolloutPart, in_order
from controller.tracking.step_record import StepRecord
from controller.workers.sampler import Sampler
from controller.workers.worker_groups import Workers
from splitppo.batch import Batch
from splitppo.rpc.errors import Place, Unavailable
from splitppo.v1.batch_pb2 import SLOT_KIND_EXPERIENCE, Slot
from tests.support.call_log import CallLog
from tests.support.fake_rollout import FakeRollout
from tests.support.fake_services import FakeActor, FakeScorer, make_config, make_table

PROMPTS = make_table().take(np.array([5, 3, 1, 0, 2]))


class Rollout(FakeRollout):
    """Deals the rows to the parts the other way round once it was started again."""

    def _parts_of(self, rows: NDArray[np.int64], num_parts: int) -> list[NDArray[np.int64]]:
        return super()._parts_of(rows[::-1] if self.restarts else rows, num_parts)


def make_step(run_dir: Path, num_parts: int, *, has_group: bool = False) -> StepContext:
    services = {"services__rollout": {}} if has_group else {}
    config, log = make_config(run_dir, rollout__stream_groups=num_parts, **services), CallLog()
    actor, rollout = FakeActor(log), Rollout(log)
    actor.committed_step = 2
    sampler = Sampler(config, actor, rollout, restart=rollout.restart) if has_group else None
    workers = Workers.of(config, actor, None, sampler=sampler)
    check = LogProbCheck(config.rollout, first_step=3)
    record = StepRecord(3, started_s=0.0)
    return StepContext(config, workers, FakeScorer(log), check, record, partial(asyncio.sleep, 0))


def make_stream(run_dir: Path, num_parts: int) -> SampledRollouts:
    return SampledRollouts.of_step(make_step(run_dir, num_parts), PROMPTS)


@pytest.mark.parametrize("num_parts", [2, 3, 10])
async def test_what_is_computed_of_parts_comes_back_in_the_order_of_the_prompts(tmp_path: Path, num_parts: int) -> None:
    stream = make_stream(tmp_path, num_parts)
    rollouts = await stream.generate()
    parts = [part async for part in stream.parts()]
    assert [(part.slot.step, part.slot.part) for part in parts] == [(3, part) for part in range(1, num_parts + 1)]
    lengths = [int(length) for part in parts for length in part.rollouts["responses"].lengths]
    assert rollouts["responses"].lengths.tolist() != lengths  # they came in another order
    computed = [Batch.from_rows(rm_scores=part.rollouts["responses"].lengths[:, None]) for part in parts]
    assert in_order(computed, stream.order)["rm_scores"].values.tolist() == rollouts["responses"].lengths.tolist()
    assert [prompt.tolist() for prompt in rollouts["prompts"].rows()[2:4]] == [PROMPTS.prompts.rows()[1].tolist()] * 2


async def test_every_row_of_a_part_comes_with_its_prompt(tmp_path: Path) -> None:
    stream = make_stream(tmp_path, 3)
    await stream.generate()
    async for part in stream.parts():
        assert part.rollouts["places"].values.tolist() == part.places.tolist()
        assert part.prompts.row_indices.tolist() == PROMPTS.row_indices[part.places // 2].tolist()
        asked = [prompt.tolist() for prompt in part.prompts.prompts.rows()]
        assert [prompt.tolist() for prompt in part.rollouts["prompts"].rows()] == asked


async def test_one_part_is_the_whole_slot(tmp_path: Path) -> None:
    stream = make_stream(tmp_path, 1)
    rollouts = await stream.generate()
    (part,) = [part async for part in stream.parts()]
    assert part.slot == Slot(kind=SLOT_KIND_EXPERIENCE, step=3)
    assert part.prompts.row_indices.tolist() == np.repeat(PROMPTS.row_indices, 2).tolist()
    assert "places" not in part.rollouts
    assert part.rollouts["responses"].values.tolist() == rollouts["responses"].values.tolist()


async def test_parts_without_rows_are_nobodys_work(tmp_path: Path) -> None:
    step = make_step(tmp_path, 12)
    stream = SampledRollouts.of_step(step, PROMPTS)
    rollouts = await stream.generate()
    assert rollouts.num_rows == 10
    (span,) = step.record.spans
    assert [len(places) for places in span.parts] == [1] * 10
    assert len([part async for part in stream.parts()]) == 10


async def test_whoever_waits_for_a_part_is_not_disturbed_by_others_that_give_up(tmp_path: Path) -> None:
    stream = make_stream(tmp_path, 1)
    patient, other = (asyncio.create_task(anext(aiter(stream.parts()))) for _ in range(2))
    await asyncio.sleep(0)
    other.cancel()
    await asyncio.sleep(0)
    await stream.generate()
    assert (await patient).rollouts.num_rows == 10


async def of_actor(run_dir: Path) -> Batch:
    return await make_stream(run_dir, 1).generate()


@pytest.mark.parametrize("num_parts", [1, 3])
async def test_a_rollout_group_samples_what_the_actor_would_and_the_actor_gets_it(
    tmp_path: Path, num_parts: int
) -> None:
    step = make_step(tmp_path, num_parts, has_group=True)
    stream = SampledRollouts.of_step(step, PROMPTS)
    rollouts = await stream.generate()
    assert stream.on_actor.is_set()
    columns = ["prompts", "responses", "rollout_log_probs", "seeds"]
    given = await step.workers.actor.get_batch(stream.slot, columns)
    for name, column in (await of_actor(tmp_path)).columns.items():
        assert given[name].values.tolist() == rollouts[name].values.tolist() == column.values.tolist()
    assert [span.pool for span in step.record.spans] == ["actor", "rollout", "rollout"]


@pytest.mark.parametrize("part", [1, 2, 3])
async def test_parts_that_were_fetched_stay_and_the_others_get_the_rest_of_the_rows_of_a_repeated_attempt(
    tmp_path: Path, part: int
) -> None:
    step = make_step(tmp_path, 3, has_group=True)
    stream, rollout = SampledRollouts.of_step(step, PROMPTS), step.workers.sampler.rollout
    assert isinstance(rollout, Rollout)
    fetched: list[RolloutPart] = []

    async def lose(number: int) -> None:
        """Before the group hands on this part, and once those before it are fetched."""
        if number == part and not rollout.restarts:
            fetched.extend([await anext(parts) for _ in range(part - 1)])
            raise Unavailable("the group is lost", Place(role="rollout"))

    rollout.log.hooks["rollout.part"] = lose
    parts = aiter(stream.parts())
    rollouts = await stream.generate()
    found = [part async for part in stream.parts()]
    assert len(rollout.restarts) == 1
    assert [number for what, _, number in rollout.log.events if what == "ready"] == [*range(1, part), 1, 2, 3]
    assert all(before is after for before, after in zip(fetched, found, strict=False))
    places = [place for part in found for place in part.places.tolist()]
    assert sorted(places) == list(range(10))
    for part_of_rows in found:
        assert part_of_rows.rollouts["places"].values.tolist() == part_of_rows.places.tolist()
    assert rollouts["responses"].values.tolist() == (await of_actor(tmp_path))["responses"].values.tolist()
