"""What the record lacks of the actor's update does not end a run: it is absent."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from controller.step.context import StepContext
from controller.step.recording import recorded_rows, update_columns
from splitppo.batch import Batch
from splitppo.rpc.errors import NotFound, Unavailable
from splitppo.v1 import batch_pb2
from tests.support.recorded import random_experience, record_config, record_of

SLOT = batch_pb2.Slot(kind=batch_pb2.SLOT_KIND_EXPERIENCE, step=3)
COLUMNS = Batch.from_rows(update_log_probs=[[0.5]], update_entropy=[[1.0]])


def step_of(config: Any, answer: Batch | Exception = COLUMNS, record: Any = None) -> StepContext:
    async def get_batch(slot: batch_pb2.Slot, columns: list[str]) -> Batch:
        assert slot == SLOT
        if isinstance(answer, Exception):
            raise answer
        return answer.select(columns)

    workers = SimpleNamespace(actor=SimpleNamespace(get_batch=get_batch))
    return cast(StepContext, SimpleNamespace(config=config, workers=workers, record=record, number=3))


async def test_the_columns_are_those_that_the_update_left_in_the_steps_slot(tmp_path: Path) -> None:
    columns = await update_columns(step_of(record_config(tmp_path)), SLOT)
    assert columns is not None
    assert columns["update_entropy"].values.tolist() == [1.0]


@pytest.mark.parametrize("error", [NotFound("there is no experience slot"), Unavailable("lost"), OSError("torn")])
async def test_what_cannot_be_fetched_is_absent(tmp_path: Path, error: Exception) -> None:
    assert await update_columns(step_of(record_config(tmp_path), error), SLOT) is None


async def test_those_responses_are_marked_that_the_budget_allows(tmp_path: Path) -> None:
    config = record_config(tmp_path, num_samples=2, tracking__rollouts__tokens_per_step=40)
    marked = await recorded_rows(step_of(config, record=record_of(*random_experience(config, [4] * 100))))
    assert np.unique(marked["recorded"].values).tolist() == [0, 1]
    assert 5 <= marked["recorded"].values.sum() <= 10


async def test_without_a_record_and_after_a_failed_choice_nothing_is_marked(tmp_path: Path) -> None:
    config = record_config(tmp_path, num_samples=2)
    off = record_config(tmp_path, num_samples=2, tracking__rollouts__enable=False)
    record, failing = (record_of(*random_experience(config, [4, 4])) for _ in range(2))
    failing.scores = cast(Any, None)
    assert await update_columns(step_of(off), SLOT) is None
    assert (await recorded_rows(step_of(off, record=record))).columns == {}
    assert (await recorded_rows(step_of(config, record=failing))).columns == {}
