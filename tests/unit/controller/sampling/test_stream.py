"""The parts of a step's responses: their rows, the calls that wait for them, and the order of the prompts."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from controller.data.prompts import NO_ROWS
from controller.sampling.stream import Asked, GrowingList, Part, SamplingGroups, in_order, sample
from controller.step.context import StepContext
from controller.step.log_prob_check import LogProbCheck
from controller.step.rollouts import SampledRollouts
from controller.tracking.step_record import StepRecord
from controller.workers.worker_groups import Workers
from splitppo.batch import Batch
from splitppo.rpc.errors import InvalidArgument, Place, Unavailable
from splitppo.v1.actor_pb2 import SamplingParams
from splitppo.v1.batch_pb2 import SLOT_KIND_EXPERIENCE, SLOT_KIND_SHARE, Slot
from tests.support.call_log import DEADLINE_S, CallLog
from tests.support.fake_rollout import FakeRollout
from tests.support.fake_services import FakeActor, FakeScorer, make_config, make_table

PROMPTS = make_table().take(np.array([5, 3, 1, 0, 2]))


class Rollout(FakeRollout):
    """Deals the rows to the parts the other way round once it was started again."""

    def _parts_of(self, rows: NDArray[np.int64], num_parts: int) -> list[NDArray[np.int64]]:
        return super()._parts_of(rows[::-1] if self.restarts else rows, num_parts)


def make_step(run_dir: Path, num_parts: int, *, has_group: bool = False, share: float = 1.0) -> StepContext:
    services: dict[str, Any] = {"services__rollout": {}, "rollout__share": share} if has_group else {}
    config, log = make_config(run_dir, rollout__stream_groups=num_parts, **services), CallLog()
    actor, rollout = FakeActor(log), Rollout(log)
    actor.committed_step = 2
    workers = Workers.of(config, actor, None, rollout=rollout if has_group else None)
    sampling = SamplingGroups.of(config, workers, restart=rollout.restart)
    check = LogProbCheck(config.rollout, first_step=3)
    record = StepRecord(3, started_s=0.0)
    return StepContext(config, workers, sampling, FakeScorer(log), check, record, partial(asyncio.sleep, 0))


def make_stream(run_dir: Path, num_parts: int) -> SampledRollouts:
    return SampledRollouts.of_step(make_step(run_dir, num_parts), PROMPTS)


@pytest.mark.parametrize("num_parts", [2, 3, 10])
async def test_what_is_computed_of_parts_comes_back_in_the_order_of_the_prompts(tmp_path: Path, num_parts: int) -> None:
    stream = make_stream(tmp_path, num_parts)
    rollouts = await stream.generate()
    parts = list(stream.parts.items)
    assert [(part.slot.step, part.slot.part) for part in parts] == [(3, part) for part in range(1, num_parts + 1)]
    lengths = [int(length) for part in parts for length in part.rollouts["responses"].lengths]
    assert rollouts["responses"].lengths.tolist() != lengths  # they came in another order
    computed = [Batch.from_rows(rm_scores=part.rollouts["responses"].lengths[:, None]) for part in parts]
    assert in_order(computed, stream.parts.items)["rm_scores"].values.tolist() == rollouts["responses"].lengths.tolist()
    assert [prompt.tolist() for prompt in rollouts["prompts"].rows()[2:4]] == [PROMPTS.prompts.rows()[1].tolist()] * 2


async def test_every_row_of_a_part_comes_with_its_prompt(tmp_path: Path) -> None:
    stream = make_stream(tmp_path, 3)
    await stream.generate()
    async for part in stream.parts:
        assert part.rollouts["places"].values.tolist() == part.places.tolist()
        assert part.prompts.row_indices.tolist() == PROMPTS.row_indices[part.places // 2].tolist()
        asked = [prompt.tolist() for prompt in part.prompts.prompts.rows()]
        assert [prompt.tolist() for prompt in part.rollouts["prompts"].rows()] == asked


async def test_one_part_is_the_whole_slot(tmp_path: Path) -> None:
    stream = make_stream(tmp_path, 1)
    rollouts = await stream.generate()
    (part,) = list(stream.parts.items)
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
    assert len(list(stream.parts.items)) == 10


async def test_whoever_waits_for_a_part_is_not_disturbed_by_others_that_give_up(tmp_path: Path) -> None:
    stream = make_stream(tmp_path, 1)
    patient, other = (asyncio.create_task(anext(aiter(stream.parts))) for _ in range(2))
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
    stream, rollout = SampledRollouts.of_step(step, PROMPTS), step.workers.rollout
    assert isinstance(rollout, Rollout)
    fetched: list[Part] = []

    async def lose(number: int) -> None:
        """Before the group hands on this part, and once those before it are fetched."""
        if number == part and not rollout.restarts:
            fetched.extend([await anext(parts) for _ in range(part - 1)])
            raise Unavailable("the group is lost", Place(role="rollout"))

    rollout.log.hooks["rollout.part"] = lose
    parts = aiter(stream.parts)
    rollouts = await stream.generate()
    found = list(stream.parts.items)
    assert len(rollout.restarts) == 1
    assert [number for what, _, number in rollout.log.events if what == "ready"] == [*range(1, part), 1, 2, 3]
    assert all(before is after for before, after in zip(fetched, found, strict=False))
    places = [place for part in found for place in part.places.tolist()]
    assert sorted(places) == list(range(10))
    for part_of_rows in found:
        assert part_of_rows.rollouts["places"].values.tolist() == part_of_rows.places.tolist()
    assert rollouts["responses"].values.tolist() == (await of_actor(tmp_path))["responses"].values.tolist()


# Two groups sample. In the order of their lengths, the second and the fourth prompt are the rollout group's.

COLUMNS = ["prompts", "responses", "rollout_log_probs", "seeds"]
OF_ROLLOUT = {2, 3, 8, 9}
PLACES = {"actor": set(range(10)) - OF_ROLLOUT, "rollout": OF_ROLLOUT}


def two_samplers(run_dir: Path, num_parts: int = 1) -> tuple[StepContext, FakeActor, Rollout]:
    step = make_step(run_dir, num_parts, has_group=True, share=0.5)
    actor, rollout = step.workers.actor, step.workers.rollout
    assert isinstance(actor, FakeActor)
    assert isinstance(rollout, Rollout)
    return step, actor, rollout


def values_of(rows: Batch) -> dict[str, list[list[float]]]:
    return {name: [row.tolist() for row in column.rows()] for name, column in rows.columns.items()}


async def parts_of(stream: SampledRollouts) -> list[list[int]]:
    """Checks the parts of complete rollouts, and returns the places of each."""
    parts = list(stream.parts.items)
    assert [part.slot for part in parts] == [
        Slot(kind=SLOT_KIND_EXPERIENCE, step=3, part=number) for number in range(1, len(parts) + 1)
    ]
    assert sorted(place for part in parts for place in part.places) == list(range(10))
    for part in parts:
        assert (np.diff(part.places) > 0).all()
        assert part.rollouts["places"].values.tolist() == part.places.tolist()
        assert part.prompts.row_indices.tolist() == PROMPTS.row_indices[part.places // 2].tolist()
    return [part.places.tolist() for part in parts]


@pytest.mark.parametrize("num_parts", [1, 2, 5])
async def test_whichever_group_is_faster_the_actor_gets_all_rows_in_the_order_of_the_prompts(
    tmp_path: Path, num_parts: int
) -> None:
    together = []
    for faster, slower in (("actor", "rollout"), ("rollout", "actor")):
        step, actor, rollout = two_samplers(tmp_path, num_parts)
        stream, go_on = SampledRollouts.of_step(step, PROMPTS), actor.log.hold(f"{slower}.generate", at_step=3)
        generating = asyncio.create_task(stream.generate())
        await actor.log.until("end", f"{faster}.generate", 3)
        assert set((await anext(aiter(stream.parts))).places.tolist()) <= PLACES[faster]
        assert not stream.on_actor.is_set()
        go_on.set()
        rollouts = await generating
        assert stream.on_actor.is_set()
        alone = make_step(tmp_path, num_parts)
        await SampledRollouts.of_step(alone, PROMPTS).generate()
        given = values_of(await actor.get_batch(stream.slot, COLUMNS))
        assert given == values_of(await alone.workers.actor.get_batch(stream.slot, COLUMNS))
        assert values_of(rollouts) == {name: given[name] for name in ("prompts", "responses")}
        assert {slot.kind for slot, _ in (*actor.sampling, *rollout.sampling)} == {SLOT_KIND_SHARE}
        spans = {span.pool: span.parts for span in step.record.spans if span.name == "gen"}
        assert {role: {place for part in parts for place in part} for role, parts in spans.items()} == PLACES
        together.append(await parts_of(stream))
    assert sorted(together[0]) == sorted(together[1])  # the same rows are computed together
    assert together[0] != together[1]


@pytest.mark.parametrize("part", [1, 2])
async def test_a_lost_rollout_group_samples_its_share_again_and_the_actor_does_not(tmp_path: Path, part: int) -> None:
    step, actor, rollout = two_samplers(tmp_path, num_parts=4)
    stream = SampledRollouts.of_step(step, PROMPTS)
    parts, fetched = aiter(stream.parts), list[list[int]]()

    async def lose(number: int) -> None:
        """Once the parts before it are fetched, also those of the actor."""
        if number == part and not rollout.restarts:
            fetched.extend([(await anext(parts)).places.tolist() for _ in range(2 + part - 1)])
            raise Unavailable("the group is lost", Place(role="rollout"))

    rollout.log.hooks["rollout.part"] = lose
    rollouts = await stream.generate()
    assert len(rollout.restarts) == 1
    assert [name for name in actor.log.names() if name.endswith("generate")] == [
        *("actor.generate", "rollout.generate", "rollout.generate")
    ]
    assert (await parts_of(stream))[: len(fetched)] == fetched
    assert values_of(rollouts) == values_of(await of_actor(tmp_path))


KINDS: dict[str, Callable[[StepContext], SampledRollouts]] = {
    "greedy": lambda step: SampledRollouts.greedy(step, PROMPTS),
    "candidates": lambda step: SampledRollouts.of_candidates(step, PROMPTS, number=2, earlier=NO_ROWS),
}


@pytest.mark.parametrize("kind", KINDS)
async def test_greedy_rollouts_and_candidates_are_dealt_likewise(tmp_path: Path, kind: str) -> None:
    step, actor, rollout = two_samplers(tmp_path, num_parts=4)
    stream = KINDS[kind](step)
    rollouts = await stream.generate()
    assert values_of(rollouts) == values_of(await KINDS[kind](make_step(tmp_path, 4)).generate())
    assert [slot for slot, _ in (*actor.sampling, *rollout.sampling)] == [stream.slot, stream.slot]
    answers = [await client.get_batch(stream.slot, ["responses"]) for client in (actor, rollout)]
    assert [rows.num_rows * 5 // rollouts.num_rows for rows in answers] == [3, 2]


async def test_the_actor_computes_once_it_has_sampled_its_share_of_the_greedy_rollouts(tmp_path: Path) -> None:
    step, actor, _ = two_samplers(tmp_path)
    go_on, stream = actor.log.hold("rollout.generate", at_step=3), SampledRollouts.greedy(step, PROMPTS)
    generating = asyncio.create_task(stream.generate())
    async with asyncio.timeout(DEADLINE_S):
        await stream.on_actor.wait()
    assert not generating.done()
    go_on.set()
    await generating


async def test_the_actor_is_busy_only_once_the_version_is_published_which_it_is_once_for_both(tmp_path: Path) -> None:
    step, actor, _ = two_samplers(tmp_path)
    go_on = actor.log.hold("actor.publish_weights", at_step=2)
    generating = asyncio.create_task(SampledRollouts.of_step(step, PROMPTS).generate())
    await actor.log.until("begin", "actor.publish_weights", 2)
    for _ in range(20):
        await asyncio.sleep(0)
    assert actor.log.names() == ["actor.publish_weights"]
    go_on.set()
    await generating
    assert sorted(actor.log.names()) == [
        *("actor.generate", "actor.publish_weights", "rollout.generate", "rollout.sync_weights")
    ]


async def test_whoever_stops_reading_leaves_nothing_running(tmp_path: Path) -> None:
    step, actor, _ = two_samplers(tmp_path, num_parts=4)
    before = asyncio.all_tasks()
    actor.log.hold("rollout.generate", at_step=3)
    seeded = PROMPTS.to_batch(1, 3, 2)
    slot = Slot(kind=SLOT_KIND_EXPERIENCE, step=3)
    asked = Asked(PROMPTS, seeded, version=2, params=SamplingParams(max_response_length=4), slot=slot, num_parts=4)
    async with contextlib.aclosing(sample(step.sampling, asked, step.record)) as parts:
        await anext(parts)
    assert asyncio.all_tasks() == before


async def test_an_error_of_a_group_is_raised_where_the_parts_are_read(tmp_path: Path) -> None:
    step, actor, _ = two_samplers(tmp_path, num_parts=4)

    async def fail(_: int) -> None:
        raise InvalidArgument("no", Place(role="actor"))

    actor.log.hooks["actor.part"] = fail
    before = asyncio.all_tasks()
    with pytest.raises(InvalidArgument):
        await SampledRollouts.of_step(step, PROMPTS).generate()
    assert asyncio.all_tasks() == before


async def test_everybody_reads_a_growing_list_from_its_beginning_to_its_end() -> None:
    numbers = GrowingList([1])

    async def read() -> list[int]:
        return [number async for number in numbers]

    early = asyncio.create_task(read())
    await asyncio.sleep(0)
    numbers.append(2)
    late = asyncio.create_task(read())
    await asyncio.sleep(0)
    numbers.append(3)
    numbers.complete()
    assert await early == await late == await read() == [1, 2, 3]
