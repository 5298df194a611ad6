"""The checkpoints folder: what counts, what is kept, what is removed, what another run left."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from controller.checkpoints import CheckpointStore
from splitppo.config import ConfigError


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints")


def write_parts(store: CheckpointStore, step: int) -> None:
    """What the services leave before the controller commits."""
    for role in ("actor", "critic"):
        (store.folder(step) / role).mkdir(parents=True)
        (store.folder(step) / role / "shard").write_text(f"{role} {step}")


def save(store: CheckpointStore, *steps: int, keep: int = 10) -> None:
    for step in steps:
        write_parts(store, step)
        store.commit(step, {"step": step}, {"training/global_step": float(step)}, keep=keep)


def folders(store: CheckpointStore) -> set[str]:
    return {folder.name for folder in store.path.glob("global_step_*")}


def test_a_folder_counts_only_with_its_marker(store: CheckpointStore) -> None:
    assert store.latest_step() == 0
    save(store, 1, 3)
    write_parts(store, 4)
    assert store.steps() == [1, 3]
    assert store.latest_step() == 3
    assert store.read_state(3) == {"step": 3}
    assert (store.path / "latest").read_text() == "3\n"


def test_steps_are_ordered_as_numbers(store: CheckpointStore) -> None:
    save(store, 9, 10, 100)
    assert store.steps() == [9, 10, 100]


def test_the_marker_is_written_after_the_state_and_before_latest(store: CheckpointStore, tmp_path: Path) -> None:
    save(store, 1)
    written = [store.folder(1) / "controller.json", store.folder(1) / "COMMITTED", store.path / "latest"]
    times_ns = [file.stat().st_mtime_ns for file in written]
    assert times_ns == sorted(times_ns)


def test_a_commit_that_fails_before_its_end_leaves_a_folder_that_does_not_count(store: CheckpointStore) -> None:
    save(store, 1)
    write_parts(store, 2)
    with pytest.raises(TypeError, match="not JSON serializable"):
        store.commit(2, {"step": object()}, {}, keep=10)
    assert store.latest_step() == 1
    assert (store.path / "latest").read_text() == "1\n"


def test_only_the_newest_are_kept_also_across_restarts(store: CheckpointStore) -> None:
    save(store, 1, 2, 3, keep=2)
    assert folders(store) == {"global_step_2", "global_step_3"}
    save(CheckpointStore(store.path), 4, keep=2)
    assert folders(store) == {"global_step_3", "global_step_4"}


def test_half_pairs_of_earlier_steps_are_removed_by_the_next_commit(store: CheckpointStore) -> None:
    write_parts(store, 1)
    write_parts(store, 5)
    save(store, 3)
    assert folders(store) == {"global_step_3", "global_step_5"}


def test_a_run_that_goes_back_forgets_later_checkpoints_and_half_pairs(store: CheckpointStore) -> None:
    save(store, 1, 2, 3)
    write_parts(store, 4)
    (store.path / "global_step_notes").mkdir()
    store.forget_after(1)
    assert folders(store) == {"global_step_1", "global_step_notes"}
    assert store.latest_step() == 1


def test_a_checkpoint_of_this_run_is_adopted_where_it_lies(store: CheckpointStore) -> None:
    save(store, 1, 2)
    before = (store.folder(1) / "actor" / "shard").stat().st_ino
    assert store.adopt(store.folder(1)) == 1
    assert (store.folder(1) / "actor" / "shard").stat().st_ino == before
    assert store.steps() == [1, 2]


def test_a_checkpoint_of_another_run_is_copied_whole(store: CheckpointStore, tmp_path: Path) -> None:
    other = CheckpointStore(tmp_path / "other" / "checkpoints")
    save(other, 7)
    assert store.adopt(other.folder(7)) == 7
    shutil.rmtree(tmp_path / "other")
    assert store.steps() == [7]
    assert store.read_state(7) == {"step": 7}
    assert (store.folder(7) / "critic" / "shard").read_text() == "critic 7"


def test_an_adopted_checkpoint_replaces_one_of_the_same_step(store: CheckpointStore, tmp_path: Path) -> None:
    other = CheckpointStore(tmp_path / "other" / "checkpoints")
    save(other, 7)
    (other.folder(7) / "actor" / "shard").write_text("another actor")
    save(store, 7)
    (store.folder(7) / "stale").touch()
    store.adopt(other.folder(7))
    assert (store.folder(7) / "actor" / "shard").read_text() == "another actor"
    assert not (store.folder(7) / "stale").exists()


def test_a_relative_path_and_a_link_are_adopted_like_the_folder_they_name(
    store: CheckpointStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(store, 2)
    monkeypatch.chdir(store.path)
    assert store.adopt(Path("global_step_2")) == 2
    (tmp_path / "best").symlink_to(store.folder(2))
    assert store.adopt(tmp_path / "best") == 2


@pytest.mark.parametrize("missing", ["COMMITTED", "controller.json"])
def test_a_torn_checkpoint_is_not_adopted(store: CheckpointStore, missing: str) -> None:
    save(store, 1)
    (store.folder(1) / missing).unlink()
    with pytest.raises(ConfigError, match=r"run\.resume: .*global_step_1 is no complete checkpoint; expected auto"):
        store.adopt(store.folder(1))


def test_a_torn_state_is_a_mistake_that_names_the_file(store: CheckpointStore) -> None:
    save(store, 1)
    (store.folder(1) / "controller.json").write_text('{"state": {')
    with pytest.raises(ConfigError, match=r"checkpoint of step 1 is torn: .*controller\.json cannot be read"):
        store.read_state(1)


@pytest.mark.parametrize("name", ["nowhere/global_step_1", "best", "global_step_x"])
def test_what_is_no_checkpoint_folder_is_not_adopted(store: CheckpointStore, tmp_path: Path, name: str) -> None:
    folder = tmp_path / name
    if "nowhere" not in name:
        folder.mkdir()
        (folder / "COMMITTED").touch()
        (folder / "controller.json").touch()
    with pytest.raises(ConfigError, match="is no complete checkpoint"):
        store.adopt(folder)
    assert store.latest_step() == 0
