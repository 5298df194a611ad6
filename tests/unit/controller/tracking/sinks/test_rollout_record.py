"""The files of responses: which are written with the record, and which without it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from controller.tracking.events import Started, StepDone, Validated
from controller.tracking.sinks.rollout_record import RolloutRecord
from controller.validation.result import ValidationResult
from splitppo.run_folder.images import ImagesOf
from splitppo.run_folder.samples import read_samples
from splitppo.run_folder.summary import Accuracy
from tests.support.recorded import byte_tokenizer, random_experience, record_config, record_of


def do_at_once(name: str, job: Callable[[], None], *, is_large: bool = False) -> None:
    job()


@pytest.mark.parametrize("is_recorded", [True, False])
def test_trackers_find_what_they_show_whether_responses_are_recorded_or_not(
    tmp_path: Path, *, is_recorded: bool
) -> None:
    changes = {"tracking__sample_freq": 2, "tracking__num_samples": 3, "tracking__rollouts__enable": is_recorded}
    config = record_config(tmp_path, num_samples=2, **changes)
    experience, scores = random_experience(config, [5, 4, 9, 3])
    lengths = experience.batch["responses"].lengths
    record = RolloutRecord(config, tmp_path, do_at_once)
    record.receive(Started(byte_tokenizer(), total_steps=2, resumed_at=0, changes=()))
    for step in (1, 2):
        record.receive(StepDone(record_of(experience, scores, step), {}))
    record.receive(Validated(2, ValidationResult(Accuracy(overall=0.5), {}, scores, {}, lengths=lengths), "val", None))
    assert read_samples(tmp_path, 1) == []
    assert [sample[0] for sample in read_samples(tmp_path, 2)] == ["train"] * 3 + ["val"] * 3
    folders = ["train", "val"] if is_recorded else ["shown_train", "shown_val"]
    assert sorted(folder.name for folder in (tmp_path / "rollouts").iterdir()) == folders


@pytest.mark.parametrize("is_recorded", [True, False])
def test_images_of_recorded_prompts_are_kept_once_and_named(tmp_path: Path, *, is_recorded: bool) -> None:
    changes = {"tracking__sample_freq": 2, "tracking__num_samples": 4, "tracking__rollouts__enable": is_recorded}
    config = record_config(tmp_path, num_samples=2, **changes)
    experience, scores = random_experience(config, [5, 4, 9, 3])
    lengths = experience.batch["responses"].lengths
    files = {"train": [b"a", b"b"], "val": [b"c"]}

    def images_of(split: str) -> ImagesOf:
        return lambda prompt: [(f"{prompt}{ord(file):031x}", memoryview(file)) for file in files[split]]

    record = RolloutRecord(config, tmp_path, do_at_once)
    images = {split: images_of(split) for split in files}
    record.receive(Started(byte_tokenizer(), total_steps=2, resumed_at=0, changes=(), images_of=images))
    for step in (1, 2):
        record.receive(StepDone(record_of(experience, scores, step), {}))
    record.receive(Validated(2, ValidationResult(Accuracy(overall=0.5), {}, scores, {}, lengths=lengths), "val", None))

    prefix = "" if is_recorded else "shown_"
    for split, own in files.items():
        rows = pq.read_table(tmp_path / f"rollouts/{prefix}{split}/2.parquet").to_pylist()
        named = [row["images"].split() for row in rows]
        assert named == [[name for name, _ in images[split](row["prompt_index"])] for row in rows]
        assert [[(tmp_path / "rollouts/images" / name).read_bytes() for name in names] for names in named] == [own] * 4
    assert len([*(tmp_path / "rollouts/images").iterdir()]) == 4 * 3  # of four prompts
