"""Prompts with images in the steps of a run: each worker group gets every response's images, once for all samples."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from controller.data.images import ImageSpool
from controller.data.prompts import PromptBatch
from controller.step.finished import FinishedRollouts
from controller.workers.command import CommandReply
from splitppo.batch import Batch
from splitppo.config import ConfigError, Schedule
from splitppo.images.columns import images_of_row
from splitppo.images.settings import read_image_settings
from splitppo.v1.batch_pb2 import Slot
from tests.support.call_log import DEADLINE_S, CallLog
from tests.support.fake_run import FakeRun, make_run
from tests.support.fake_services import FakeActor, FakeCritic, make_table
from tests.support.vision_folders import write_vision_folder
from tests.support.vision_models import draw_image

SCHEDULES: list[Schedule] = ["serial", "gather", "overlap"]
STALE: dict[str, Any] = {"rollout__staleness": 1, "algorithm__rollout_correction__rollout_is": "token"}
KINDS: dict[str, dict[str, Any]] = {
    "all prompts": {},
    "parts": {"rollout__stream_groups": 4},
    "dynamic sampling": {"algorithm__filter_groups__enable": True},
    "greedy baseline": {"algorithm__adv_estimator": "remax"},
    "without a critic": {"algorithm__adv_estimator": "grpo"},
    "a rollout group": {"services__rollout": {}},
    "a share of a rollout group": {"services__rollout": {}, "rollout__share": 0.5, "rollout__stream_groups": 4},
    "one step ahead": STALE,
    "one step ahead, in a rollout group": {**STALE, "services__rollout": {}},
    "one step ahead, greedy baseline": {**STALE, "algorithm__adv_estimator": "remax"},
    "one step ahead, dynamic sampling": {**STALE, "algorithm__filter_groups__enable": True},
}

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_task_is_left")]


def files_of(rows: Batch) -> list[list[bytes]]:
    """The files of the images of each row."""
    columns = zip(rows["images"].rows(), rows["image_sizes"].rows(), strict=True)
    return [[bytes(image.data) for image in images_of_row(files, sizes)] for files, sizes in columns]


class Actor(FakeActor):
    """Remembers the rows that each step learns from, and all that is sampled from."""

    def __init__(self, log: CallLog) -> None:
        super().__init__(log)
        self.learned: dict[int, Batch] = {}

    async def update(self, slot: Slot, **others: Any) -> CommandReply:
        self.learned[slot.step] = self._slot(slot)
        return await super().update(slot, **others)


class Critic(FakeCritic):
    """Remembers the rows of each call that computes values."""

    def __init__(self, log: CallLog) -> None:
        super().__init__(log)
        self.valued: defaultdict[int, list[Batch]] = defaultdict(list)

    async def compute_values(self, slot: Slot, *, base_step: int) -> CommandReply:
        self.valued[slot.step].append(self._slot(slot))
        return await super().compute_values(slot, base_step=base_step)


def table_of(tmp_path: Path, first_image: int = 0) -> PromptBatch:
    """Six prompts of different tokens, with no image, one and two in turn; the fourth one has those of the second."""
    settings = read_image_settings(Path(write_vision_folder(tmp_path / f"model{first_image}")))
    assert settings is not None
    spool = ImageSpool(settings)
    numbers = [[], [0], [1, 2], [0], [], [3, 0]]
    images = [spool.add([draw_image(first_image + number, 28, 56) for number in row]) for row in numbers]
    prompts = make_table().prompts
    tokens = Batch.from_rows(prompts=[[*row, 10 + number] for number, row in enumerate(prompts.rows())])["prompts"]
    rows = [replace(row, images=of_row) for row, of_row in zip(make_table().rows, images, strict=True)]
    return replace(make_table(), prompts=tokens, rows=tuple(rows), images=spool.columns(images))


def assert_images_are_those_of_prompts(rows: Batch, table: PromptBatch) -> None:
    of_prompt = {
        prompt.tobytes(): files for prompt, files in zip(table.prompts.rows(), files_of(table.columns), strict=True)
    }
    assert files_of(rows) == [of_prompt[prompt.tobytes()] for prompt in rows["prompts"].rows()]


async def trained(run_dir: Path, table: PromptBatch, **changes: Any) -> FakeRun:
    run = make_run(run_dir, actor=Actor, critic=Critic, table=table, **changes)
    async with asyncio.timeout(DEADLINE_S):
        await run.trainer.fit()
    return run


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("kind", KINDS)
async def test_every_group_learns_with_the_images_of_its_prompts(tmp_path: Path, kind: str, schedule: Schedule) -> None:
    table = table_of(tmp_path)
    run = await trained(tmp_path / "run", table, run__schedule=schedule, **KINDS[kind])
    assert isinstance(run.actor, Actor)
    assert isinstance(run.critic, Critic)
    assert run.actor.learned.keys() == {1, 2, 3}
    for rows in run.actor.learned.values():
        assert rows.num_rows == 4
        assert_images_are_those_of_prompts(rows, table)
        assert rows["images"].store is table.columns["images"].store
    for rows in (part for parts in run.critic.valued.values() for part in parts):
        assert_images_are_those_of_prompts(rows, table)
    assert bool(run.critic.valued) == run.config.uses_critic


@pytest.mark.parametrize(
    "kind", ["one step ahead", "one step ahead, greedy baseline", "one step ahead, dynamic sampling"]
)
async def test_stored_rollouts_get_their_images_from_the_data_files(tmp_path: Path, kind: str) -> None:
    table = table_of(tmp_path)
    whole = await trained(tmp_path / "whole", table, **KINDS[kind])
    stopped = await trained(tmp_path / "stopped", table, run__stop_after_step=1, **KINDS[kind])
    stored = stopped.store.rollouts(1)
    assert stored is not None
    assert draw_image(0, 28, 56) not in stored
    resumed = make_run(tmp_path / "stopped", actor=Actor, table=table, at_step=1, rollouts=stored, **KINDS[kind])
    resumed.trainer = replace(resumed.trainer, state=stopped.store.load(1).state)
    await resumed.trainer.fit()
    assert isinstance(whole.actor, Actor)
    assert isinstance(resumed.actor, Actor)
    for step in (2, 3):
        assert files_of(resumed.actor.learned[step]) == files_of(whole.actor.learned[step])
        assert_images_are_those_of_prompts(resumed.actor.learned[step], table)


async def test_stored_rollouts_of_other_images_are_refused(tmp_path: Path) -> None:
    stopped = await trained(tmp_path / "run", table_of(tmp_path), run__stop_after_step=1, **STALE)
    stored = stopped.store.rollouts(1)
    assert stored is not None
    FinishedRollouts.parse(stored, table_of(tmp_path))
    with pytest.raises(ConfigError, match="the checkpoint holds responses to other prompts than these"):
        FinishedRollouts.parse(stored, table_of(tmp_path, first_image=4))


async def test_all_schedules_make_the_same_metrics(tmp_path: Path) -> None:
    lines = []
    for schedule in SCHEDULES:
        run = await trained(tmp_path / schedule, table_of(tmp_path / schedule), run__schedule=schedule)
        timed = ("timing", "perf/", "overlap/", "rpc/", "recovery/")
        lines.append([{key: row[key] for key in row if not key.startswith(timed)} for row in run.metrics])
    assert lines[0] == lines[1] == lines[2]
    assert np.isfinite(lines[0][-1]["prompt_length/mean"])
