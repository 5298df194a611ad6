"""The parts of a step's responses: their rows, the calls that wait for them, and the order of the prompts."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from controller.step.context import StepContext
from controller.step.generation import SampledRollouts
from controller.step.log_prob_check import LogProbCheck
from controller.step.parts import in_order
from controller.tracking.step_record import StepRecord
from controller.workers.worker_groups import Workers
from splitppo.batch import Batch
from splitppo.v1.batch_pb2 import SLOT_KIND_EXPERIENCE, Slot
from tests.support.fake_services import CallLog, FakeActor, FakeScorer, make_config, make_table

PROMPTS = make_table().take(np.array([5, 3, 1, 0, 2]))


def make_step(run_dir: Path, num_parts: int) -> StepContext:
    config, log = make_config(run_dir, rollout__stream_groups=num_parts), CallLog()
    actor = FakeActor(log)
    actor.committed_step = 2
    workers, check = Workers.of(config, actor, None), LogProbCheck(config.rollout, first_step=3)
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
    assert [len(places) for places in span.parts] == [1] * 10 + [0] * 2
    assert len([part async for part in stream.parts()]) == 10


async def test_whoever_waits_for_a_part_is_not_disturbed_by_others_that_give_up(tmp_path: Path) -> None:
    stream = make_stream(tmp_path, 1)
    patient, other = (asyncio.create_task(anext(aiter(stream.parts()))) for _ in range(2))
    await asyncio.sleep(0)
    other.cancel()
    await asyncio.sleep(0)
    await stream.generate()
    assert (await patient).rollouts.num_rows == 10
