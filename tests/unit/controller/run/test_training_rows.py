"""The training rows that a run begins with, and a resume with others."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from controller.data.images import RowImages
from controller.data.prompt_files import PromptRow
from controller.run.folder import RunFolder
from controller.run.training_rows import ROWS_FILE, TrainingRows
from splitppo.config import ConfigError
from tests.support.fake_services import make_config
from tests.support.table_of_files import entry_of
from tests.support.vision_folders import image_row, load_with_images, write_vision_folder
from tests.support.vision_models import draw_image

ROW = PromptRow("one.jsonl, line 1", [{"role": "user", "content": "1 + 1"}], "sums", "2", {"level": 1})
ROWS = (ROW, replace(ROW, prompt="2 + 2", ground_truth=None, extra_info={}), replace(ROW, file_index=1))


def described(tmp_path: Path, rows: Sequence[PromptRow] = ROWS) -> TrainingRows:
    return TrainingRows.of(make_config(tmp_path / "run", data__train_files=["one.jsonl", "two.jsonl"]).data, rows)


@pytest.mark.parametrize(
    ("rows", "changed"),
    [
        (ROWS, ""),
        ([replace(row, place="elsewhere", observation="hello") for row in ROWS], ""),
        ((ROWS[1], ROWS[0], ROWS[2]), "one.jsonl (2 rows then, 2 now)"),
        ((*ROWS, ROWS[2]), "two.jsonl (1 rows then, 2 now)"),
        (ROWS[:2], "two.jsonl (1 rows then, 0 now)"),
        ([replace(row, ground_truth="3") for row in ROWS], "one.jsonl (2 rows then, 2 now) and two.jsonl (1 rows"),
        ((replace(ROW, prompt="1 + 1"), *ROWS[1:]), "one.jsonl (2 rows then, 2 now)"),
        ((replace(ROW, data_source="other"), *ROWS[1:]), "one.jsonl (2 rows then, 2 now)"),
        ((replace(ROW, extra_info={"level": 2}), *ROWS[1:]), "one.jsonl (2 rows then, 2 now)"),
        ((replace(ROW, images=RowImages(1, ("a",), ((2, 4),))), *ROWS[1:]), "one.jsonl (2 rows then, 2 now)"),
    ],
)
def test_what_prompts_rewards_and_order_are_made_of_counts(
    tmp_path: Path, rows: Sequence[PromptRow], changed: str
) -> None:
    found = described(tmp_path, rows).changed_from(described(tmp_path))
    assert found.startswith(changed)
    assert bool(found) == bool(changed)


def test_another_image_under_the_same_path_counts(tmp_path: Path) -> None:
    model = write_vision_folder(tmp_path / "model")
    file = tmp_path / "one.jsonl"
    file.write_text(json.dumps(image_row("<image>", ["a.png"])) + "\n")

    def rows_with(image: bytes, **settings: Any) -> TrainingRows:
        (tmp_path / "a.png").write_bytes(image)
        return described(tmp_path, load_with_images(model, file, **settings).rows)

    first = rows_with(draw_image(1, 56, 56))
    assert rows_with(draw_image(1, 56, 56)).changed_from(first) == ""
    for other in (rows_with(draw_image(2, 56, 56)), rows_with(draw_image(1, 56, 56), max_pixels=28 * 28)):
        assert other.changed_from(first) == "one.jsonl (1 rows then, 1 now)"


class Unknown:
    """Something whose text has its address."""


@pytest.mark.parametrize(
    ("value", "like"),
    [
        (Unknown(), Unknown()),
        ({8, 0}, {0, 8}),  # these sets have their values in different orders
        (np.arange(3), [0, 1, 2]),
        (np.float32(0.5), 0.5),
        (b"bytes", b"bytes"),
        (date(2026, 1, 1), date(2026, 1, 1)),
        ({(1, 2): 3, "a": float("nan")}, {"a": float("nan")}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_of_values_that_no_file_could_hold_nothing_counts_that_another_process_has_otherwise(
    tmp_path: Path, value: Any, like: Any
) -> None:
    def of(some: Any) -> TrainingRows:
        return described(tmp_path, [replace(ROW, extra_info={"value": some})])

    assert of(value).changed_from(of(like)) == ""


def start(run_dir: Path, rows: TrainingRows, *, leaves_a_step: bool = True) -> None:
    with RunFolder(make_config(run_dir)) as folder:
        folder.keep_rows(rows)
        if leaves_a_step:
            (run_dir / "metrics.jsonl").write_text('{"step": 1}\n')


def test_a_resume_with_other_rows_is_refused_and_a_new_run_may_have_them(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    start(run_dir, described(tmp_path))
    start(run_dir, described(tmp_path))
    before = (run_dir / ROWS_FILE).read_bytes()
    other = described(tmp_path, ROWS[:2])
    sentence = (
        f"run.dir: {run_dir} belongs to a run with other rows of two.jsonl (1 rows then, 0 now): put them back as they"
        " were; a resumed run keeps these rows, a new run may change them: run.dir=NEW"
    )
    with pytest.raises(ConfigError) as refused:
        start(run_dir, other)
    assert str(refused.value) == sentence
    folder = RunFolder(make_config(run_dir))
    folder.check()
    with pytest.raises(ConfigError) as refused:
        folder.check_rows(other)
    assert str(refused.value) == sentence
    assert (run_dir / ROWS_FILE).read_bytes() == before
    start(tmp_path / "new", other)
    assert entry_of(ROWS_FILE) is not None


def test_a_run_without_a_step_and_one_of_an_older_version_take_any_rows_and_keep_them(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    start(run_dir, described(tmp_path), leaves_a_step=False)
    start(run_dir, described(tmp_path, ROWS[:2]))
    (run_dir / ROWS_FILE).unlink()
    start(run_dir, described(tmp_path))
    with pytest.raises(ConfigError, match=r"belongs to a run with other rows of two\.jsonl"):
        start(run_dir, described(tmp_path, ROWS[:2]))


def test_a_description_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    start(tmp_path / "run", described(tmp_path))
    (tmp_path / "run" / ROWS_FILE).write_text("{")
    with pytest.raises(ConfigError, match=rf"^run\.dir: cannot use {tmp_path}/run/{ROWS_FILE}: "):
        start(tmp_path / "run", described(tmp_path))
