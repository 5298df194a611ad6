"""The files of steps go with the run when it goes back, and lose their tokens when there is too much of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from controller.tracking.record.rollout_file import train_file
from splitppo.run_folder.rollout_store import RolloutStore
from splitppo.run_folder.rollout_writer import without_tokens
from tests.support.recorded import byte_tokenizer, random_experience, record_config, record_of


@pytest.fixture
def content(tmp_path: Path) -> Any:
    config = record_config(tmp_path)
    return train_file(record_of(*random_experience(config, [30] * 20), 1), config, byte_tokenizer())


def steps_with_tokens(folder: Path) -> list[int]:
    files = folder.glob("train/*.parquet")
    return sorted(int(file.stem) for file in files if "ids" in pq.read_schema(file).names)


def test_files_of_later_steps_are_removed_when_a_run_goes_back(tmp_path: Path) -> None:
    store = RolloutStore(tmp_path, 1e9)
    for step in (1, 2, 3):
        store.put("train", step, b"train")
    store.put("val", 2, b"val")
    (tmp_path / "train" / "notes.parquet").write_bytes(b"of the user")
    RolloutStore(tmp_path, 1e9).cut_back(1)
    left = sorted(str(file.relative_to(tmp_path)) for file in tmp_path.rglob("*") if file.is_file())
    assert left == ["train/1.parquet", "train/notes.parquet"]


def test_odd_steps_lose_their_tokens_first_and_some_steps_never(tmp_path: Path, content: Any) -> None:
    num_steps = 70
    RolloutStore(tmp_path, 1e9).put("val", 7, b"val")
    store = RolloutStore(tmp_path, (num_steps - 1) * len(content))
    for step in range(1, num_steps + 1):
        store.put("train", step, content)
    thinned = sorted({*range(1, num_steps + 1)} - {*steps_with_tokens(tmp_path)})
    assert thinned
    assert all(step % 2 for step in thinned)
    assert thinned[0] == 3
    assert 7 not in thinned
    assert sum(file.stat().st_size for file in tmp_path.rglob("*.parquet")) <= (num_steps - 1) * len(content)


def test_without_an_older_step_the_limit_costs_nobody_tokens(tmp_path: Path, content: Any) -> None:
    store = RolloutStore(tmp_path, 1.0)
    for step in range(1, 53):
        store.put("train", step, content)
    assert steps_with_tokens(tmp_path) == [1, *range(3, 53)]


def test_a_start_with_a_lower_limit_goes_on_where_the_last_one_ended(tmp_path: Path, content: Any) -> None:
    first = RolloutStore(tmp_path, 1e9)
    for step in range(1, 61):
        first.put("train", step, content)
    second = RolloutStore(tmp_path, 1.0)
    for step in range(61, 65):
        second.put("train", step, content)
    assert steps_with_tokens(tmp_path) == [1, *range(15, 65)]


def test_starts_in_a_row_hold_the_limit(tmp_path: Path, content: Any) -> None:
    """Each of them makes 5 steps, and finds those without tokens that the ones before it have made."""
    without = len(without_tokens(memoryview(content).tobytes()))
    limit = 60 * len(content) + 60 * without
    for start in range(22):
        store = RolloutStore(tmp_path, limit)
        for step in range(5 * start + 1, 5 * start + 8):
            store.put("train", step, content)
        store.cut_back(5 * start + 5)
    assert len(steps_with_tokens(tmp_path)) < 100
    assert sum(file.stat().st_size for file in tmp_path.rglob("*.parquet")) <= limit


def test_a_folder_in_the_place_of_a_file_keeps_no_other_file_of_a_later_step(tmp_path: Path) -> None:
    store = RolloutStore(tmp_path, 1e9)
    for step in (1, 3, 5):
        store.put("train", step, b"train")
    (tmp_path / "train" / "4.parquet").mkdir()
    RolloutStore(tmp_path, 1e9).cut_back(1)
    assert sorted(file.name for file in (tmp_path / "train").iterdir()) == ["1.parquet", "4.parquet"]
    with pytest.raises(OSError, match=r"train/4\.parquet: expected a file, got a folder$"):
        store.put("train", 4, b"train")


def test_an_image_is_written_once_and_stays_when_the_run_goes_back(tmp_path: Path) -> None:
    name = "0" * 32
    store = RolloutStore(tmp_path, 1e9)
    assert store.put_image(name, b"as it is")
    written = (tmp_path / "images" / name).stat()
    assert store.put_image(name, memoryview(b"as it is"))
    store.cut_back(0)
    again = RolloutStore(tmp_path, 1e9)
    assert again.put_image(name, b"as it is")
    now = (tmp_path / "images" / name).stat()
    assert (now.st_ino, now.st_mtime_ns) == (written.st_ino, written.st_mtime_ns)
    assert (tmp_path / "images" / name).read_bytes() == b"as it is"


def test_images_take_a_quarter_of_the_limit_at_most(tmp_path: Path) -> None:
    names = [f"{number:032x}" for number in range(5)]
    store = RolloutStore(tmp_path, 400.0)
    assert [store.put_image(name, bytes(30)) for name in names] == [True, True, True, False, False]
    assert store.put_image(names[4], bytes(10))
    again = RolloutStore(tmp_path, 400.0)
    assert not again.put_image("f" * 32, bytes(1))
    assert again.put_image(names[0], bytes(30))


def test_images_leave_less_room_for_tokens(tmp_path: Path, content: Any) -> None:
    def left(with_image: bool) -> list[int]:
        folder = tmp_path / str(with_image)
        store = RolloutStore(folder, 65 * len(content))
        if with_image:
            store.put_image("0" * 32, bytes(10 * len(content)))
        for step in range(1, 61):
            store.put("train", step, content)
        return steps_with_tokens(folder)

    assert left(with_image=False) == [*range(1, 61)]
    assert len(left(with_image=True)) < 60
