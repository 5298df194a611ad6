"""The folder of checkpoints: complete ones, kept ones, removed ones, and those of another run."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from controller.run.checkpoint_store import CheckpointStore, ControllerPart
from controller.run.state import RunState
from splitppo.config import ConfigError
from splitppo.manifest import DamagedCheckpoint
from splitppo.plain_file import NoPlainFile
from tests.support.checkpoints import DAMAGES, cut, empty, flip, remove, write_part


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints")


def write_parts(store: CheckpointStore, step: int) -> dict[str, str]:
    """Writes the parts of the services before the controller commits; returns the sha256 of their manifests."""
    return {role: write_part(store.folder(step) / role, role, step) for role in ("actor", "critic")}


def save(store: CheckpointStore, *steps: int, keep: int | None = 10, best: int | None = None) -> None:
    for step in steps:
        manifests = write_parts(store, step)
        state = part(step).state.model_dump(mode="json")
        store.commit(step, state, part(step).metrics, manifests=manifests, keep=keep, best=best)


def part(step: int) -> ControllerPart:
    return ControllerPart(state=RunState(step=step, kl_coef=0.5), metrics={"training/global_step": float(step)})


def folders(store: CheckpointStore) -> set[str]:
    return {folder.name for folder in store.path.glob("global_step_*")}


def test_a_folder_counts_only_with_its_marker(store: CheckpointStore) -> None:
    assert store.latest_step() == 0
    save(store, 1, 3)
    write_parts(store, 4)
    assert store.steps() == [1, 3]
    assert store.latest_step() == 3
    assert store.load(3) == part(3)
    assert (store.path / "latest").read_text() == "3\n"


def test_steps_are_ordered_as_numbers(store: CheckpointStore) -> None:
    save(store, 9, 10, 100)
    assert store.steps() == [9, 10, 100]


@pytest.mark.parametrize("number", ["010", "²", "10 copy"])
def test_a_folder_that_no_run_has_named_is_left_alone(store: CheckpointStore, number: str) -> None:
    save(store, 9, 10)
    shutil.move(store.folder(10), folder := store.path / f"global_step_{number}")
    assert store.newest_whole_step() == 9
    store.remove_leftovers()
    assert (folder / "COMMITTED").exists()


@pytest.mark.parametrize(
    ("fails", "written"),
    [
        ("global_step_1/controller.json", []),
        ("global_step_1/COMMITTED", ["controller.json"]),
        ("latest", ["controller.json", "COMMITTED"]),
    ],
)
def test_the_marker_is_written_after_the_state_and_before_latest(
    store: CheckpointStore, fails: str, written: list[str]
) -> None:
    manifests = write_parts(store, 1)
    (store.path / fails).mkdir()
    with pytest.raises(NoPlainFile):
        store.commit(1, {"step": 1}, {}, manifests=manifests, keep=10)
    in_order = [store.folder(1) / "controller.json", store.folder(1) / "COMMITTED", store.path / "latest"]
    assert [file.name for file in in_order if file.is_file()] == written


def test_a_commit_that_fails_before_its_end_leaves_a_folder_that_does_not_count(store: CheckpointStore) -> None:
    save(store, 1)
    write_parts(store, 2)
    with pytest.raises(TypeError):  # of the json module
        store.commit(2, {"step": object()}, {}, manifests={}, keep=10)
    assert store.latest_step() == 1
    assert (store.path / "latest").read_text() == "1\n"


def test_only_the_newest_are_kept_also_across_restarts(store: CheckpointStore) -> None:
    save(store, 1, 2, 3, keep=2)
    assert folders(store) == {"global_step_2", "global_step_3"}
    save(CheckpointStore(store.path), 4, keep=2)
    assert folders(store) == {"global_step_3", "global_step_4"}
    save(store, 5, 6, 7, 8, keep=None)
    assert store.steps() == [3, 4, 5, 6, 7, 8]


def test_the_best_is_kept_beside_the_newest_also_across_restarts_and_a_link_leads_to_it(store: CheckpointStore) -> None:
    save(store, 1, keep=1, best=1)
    save(store, 2, 3, keep=1, best=1)
    assert store.steps() == [1, 3]
    save(CheckpointStore(store.path), 4, keep=1, best=1)
    assert store.steps() == [1, 4]
    assert (store.path / "best").resolve() == store.folder(1)
    save(store, 5, keep=1, best=5)
    assert store.steps() == [5]
    assert (store.path / "best").resolve() == store.folder(5)


def test_the_link_to_the_best_goes_with_it(store: CheckpointStore) -> None:
    save(store, 1, 2, keep=1, best=2)
    store.forget_after(1)
    assert not (store.path / "best").is_symlink()
    save(store, 2, keep=1, best=2)
    save(store, 3, keep=1, best=None)
    assert not (store.path / "best").is_symlink()
    assert store.steps() == [3]


def test_the_best_can_be_resumed_from_by_its_link(store: CheckpointStore, tmp_path: Path) -> None:
    save(store, 1, 2, best=1)
    other = CheckpointStore(tmp_path / "other")
    assert other.adopt(store.path / "best") == 1
    assert store.adopt(store.path / "best") == 1


def test_what_interrupted_saves_have_left_is_removed_by_the_next_commit(store: CheckpointStore) -> None:
    write_parts(store, 1)
    write_parts(store, 5)
    (store.path / ".latest.17.tmp").touch()
    save(store, 3)
    assert folders(store) == {"global_step_3"}
    assert {entry.name for entry in store.path.iterdir()} == {"global_step_3", "latest"}


def test_what_interrupted_saves_have_left_is_removed_and_named(store: CheckpointStore) -> None:
    save(store, 3)
    write_parts(store, 5)
    (store.path / "global_step_6").mkdir()
    (store.path / "global_step_notes").mkdir()
    assert store.remove_leftovers() == [5, 6]
    assert folders(store) == {"global_step_3", "global_step_notes"}


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
    assert store.load(7) == part(7)
    assert (store.folder(7) / "critic" / "shard").read_text() == "critic 7"


def test_an_adopted_checkpoint_replaces_one_of_the_same_step(store: CheckpointStore, tmp_path: Path) -> None:
    other = CheckpointStore(tmp_path / "other" / "checkpoints")
    save(other, 7)
    before = (other.folder(7) / "actor" / "shard").stat().st_ino
    save(store, 7)
    (store.folder(7) / "stale").touch()
    store.adopt(other.folder(7))
    assert (store.folder(7) / "actor" / "shard").stat().st_ino == before
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


def pair_of_another_run(tmp_path: Path, step: int, run_id: str = "theirs") -> Path:
    other = CheckpointStore(tmp_path / "other" / "checkpoints", run_id)
    save(other, step)
    return other.folder(step)


def test_one_that_was_copied_in_can_be_adopted_where_it_lies_and_says_so_from_then_on(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints", "ours")
    shutil.copytree(pair_of_another_run(tmp_path, 7), store.folder(7))
    assert store.adopt(store.folder(7)) == 7
    assert CheckpointStore(store.path, "ours").newest_whole_step() == 7
    marker = json.loads((store.folder(7) / "COMMITTED").read_text())
    assert (marker["run_id"], marker["adopted_from"]) == ("ours", f"{store.folder(7)}, run theirs")


def test_an_adopted_checkpoint_is_the_run_s_own_and_names_where_it_came_from(tmp_path: Path) -> None:
    store, theirs = CheckpointStore(tmp_path / "checkpoints", "ours"), pair_of_another_run(tmp_path, 7)
    before = (theirs / "COMMITTED").read_bytes()
    assert store.adopt(theirs) == 7
    assert CheckpointStore(store.path, "ours").newest_whole_step() == 7
    marker = json.loads((store.folder(7) / "COMMITTED").read_text())
    assert (marker["run_id"], marker["adopted_from"]) == ("ours", f"{theirs}, run theirs")
    assert (theirs / "COMMITTED").read_bytes() == before


def test_a_checkpoint_of_a_version_that_wrote_no_run_id_is_gone_on_from(tmp_path: Path) -> None:
    save(CheckpointStore(tmp_path / "checkpoints"), 3)
    assert "run_id" not in json.loads((tmp_path / "checkpoints" / "global_step_3" / "COMMITTED").read_text())
    assert CheckpointStore(tmp_path / "checkpoints", "ours").newest_whole_step() == 3


# Bad luck.

OF_THE_CONTROLLER = ["COMMITTED", "controller.json", "actor/manifest.json", "critic/manifest.json"]


# Without its marker it would be no checkpoint at all.
ALL_BUT_HALF_PAIRS = [
    (file, damage) for file in OF_THE_CONTROLLER for damage in DAMAGES if (file, damage) != ("COMMITTED", remove)
]


@pytest.mark.parametrize(("file", "damage"), ALL_BUT_HALF_PAIRS)
def test_the_pair_before_a_damaged_one_is_used_and_nothing_is_lost(
    store: CheckpointStore, file: str, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    save(store, 1, 2)
    damage(store.folder(2) / file)
    with caplog.at_level(logging.WARNING):
        assert store.newest_whole_step() == 1
    (warning,) = caplog.records
    assert "the checkpoint of step 2 is damaged (" in warning.message
    assert f"{store.folder(2) / file}: " in warning.message
    assert warning.message.endswith("renamed to damaged_global_step_2; the one before is used: step 1")
    assert (store.path / "damaged_global_step_2" / "actor" / "shard").read_text() == "actor 2"
    assert store.steps() == [1]


def test_every_single_bit_of_a_marker_counts(store: CheckpointStore) -> None:
    save(store, 1)
    marker = store.folder(1) / "COMMITTED"
    content = marker.read_bytes()
    for position in range(len(content)):
        changed = bytearray(content)
        changed[position] ^= 1
        marker.write_bytes(changed)
        with pytest.raises(DamagedCheckpoint, match="COMMITTED: expected "):
            store.check(1)
    marker.write_bytes(content)
    assert set(store.check(1)) == {"actor", "critic"}


def test_the_marker_of_another_checkpoint_does_not_count(store: CheckpointStore) -> None:
    save(store, 1, 2)
    shutil.copy(store.folder(1) / "COMMITTED", store.folder(2) / "COMMITTED")
    with pytest.raises(DamagedCheckpoint, match=r"COMMITTED: expected the commit marker of step 2"):
        store.check(2)


def test_a_whole_part_of_another_checkpoint_does_not_count(store: CheckpointStore) -> None:
    save(store, 1, 2)
    shutil.rmtree(store.folder(2) / "critic")
    shutil.copytree(store.folder(1) / "critic", store.folder(2) / "critic")
    with pytest.raises(DamagedCheckpoint, match=r"critic/manifest\.json: expected sha256 "):
        store.check(2)


def test_when_all_are_damaged_the_initial_models_are_left(
    store: CheckpointStore, caplog: pytest.LogCaptureFixture
) -> None:
    save(store, 1, 2)
    empty(store.folder(1) / "COMMITTED")
    flip(store.folder(2) / "controller.json")
    assert store.newest_whole_step() == 0
    assert "NONE IS LEFT, the run starts again at step 0 with the initial models" in caplog.records[-1].message
    save(store, 2)
    cut(store.folder(2) / "COMMITTED")
    assert store.newest_whole_step() == 0
    assert {folder.name for folder in store.path.glob("damaged_*")} == {
        "damaged_global_step_1",
        "damaged_global_step_2",
        "damaged_global_step_2.2",
    }


def test_a_damaged_checkpoint_counts_not_among_those_that_are_kept(store: CheckpointStore) -> None:
    save(store, 1, 2, 3, keep=3)
    store.set_aside(3, DamagedCheckpoint("the shard is gone"))
    save(store, 4, keep=2)
    assert folders(store) == {"global_step_2", "global_step_4"}


def test_a_pair_without_a_critic_is_whole(store: CheckpointStore) -> None:
    store.commit(1, {}, {}, manifests={"actor": write_part(store.folder(1) / "actor", "actor", 1)}, keep=1)
    assert list(store.check(1)) == ["actor"]


def test_a_damaged_checkpoint_of_another_run_is_not_adopted_and_costs_none_of_this_one(
    store: CheckpointStore, tmp_path: Path
) -> None:
    other = CheckpointStore(tmp_path / "other" / "checkpoints")
    save(other, 7)
    save(store, 7)
    flip(other.folder(7) / "critic" / "shard")
    with pytest.raises(
        ConfigError, match=r"run\.resume: .* is damaged: .*/global_step_7/critic/shard: expected sha256"
    ):
        store.adopt(other.folder(7))
    assert set(store.check(7)) == {"actor", "critic"}


def test_a_removal_that_is_cut_short_leaves_nothing_that_counts(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(store, 1, 2)
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: None)
    store.forget_after(1)
    assert (store.folder(2) / "actor" / "shard").exists()
    assert store.steps() == [1]


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


def test_finished_rollouts_count_for_the_run_that_sampled_them_alone(tmp_path: Path) -> None:
    own, other = CheckpointStore(tmp_path / "own", "a"), CheckpointStore(tmp_path / "other", "b")
    manifests, state = write_parts(own, 1), part(1).state.model_dump(mode="json")
    own.commit(1, state, {}, manifests=manifests, keep=None, rollouts=b"finished")
    save(own, 2)
    assert own.rollouts(1) == b"finished"
    assert own.rollouts(2) is None
    assert other.adopt(own.folder(1)) == 1
    assert other.rollouts(1) is None
    copy = shutil.copytree(own.folder(1), tmp_path / "copy" / own.folder(1).name)
    own.forget_after(0)
    assert own.adopt(copy) == 1
    assert own.rollouts(1) == b"finished"
    assert set(own.check(1)) == set(other.check(1)) == {"actor", "critic"}
