"""The start of a run: its pair, the state of the controller, and files that a crash has left."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from controller.run.checkpoint_store import CheckpointStore
from controller.run.folder import RunFolder
from controller.run.restore import RestorePoint
from controller.run.state import RunState
from splitppo.config import Config, ConfigError
from tests.support.fake_services import make_config


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "run" / "checkpoints")


def save(store: CheckpointStore, *steps: int) -> None:
    for step in steps:
        state = RunState(step=step, kl_coef=0.5).model_dump(mode="json")
        store.commit(step, state, {"training/global_step": step}, manifests={}, keep=3)


def start(store: CheckpointStore, **changes: Any) -> RestorePoint:
    return RestorePoint(make_config(store.path.parent, **changes), store)


@pytest.mark.parametrize(("resume", "expected"), [("auto", 2), ("disable", 0)])
def test_a_run_resumes_from_its_newest_checkpoint_or_not_at_all(
    store: CheckpointStore, resume: str, expected: int
) -> None:
    assert start(store, run__resume=resume).step == 0
    save(store, 1, 2)
    assert start(store, run__resume=resume).step == expected


def test_a_run_resumes_from_a_checkpoint_of_its_own_or_of_another_run(store: CheckpointStore, tmp_path: Path) -> None:
    other = CheckpointStore(tmp_path / "other")
    save(other, 7)
    point = start(store, run__resume=str(other.folder(7)))
    assert (point.step, point.state, point.metrics) == (7, RunState(step=7, kl_coef=0.5), {"training/global_step": 7})
    save(store, 8)
    assert start(store, run__resume=str(store.folder(7))).step == 7


def test_a_checkpoint_that_was_copied_from_another_run_s_folder_is_not_resumed_from(tmp_path: Path) -> None:
    def resume(config: Config) -> int:
        with RunFolder(config) as folder:
            return RestorePoint(folder.config, folder.checkpoints).step

    ours, theirs = make_config(tmp_path / "ours"), make_config(tmp_path / "theirs")
    for config, step in ((ours, 2), (theirs, 7)):
        with RunFolder(config) as folder:
            save(folder.checkpoints, step)
    copied = shutil.copytree(theirs.run.dir / "checkpoints/global_step_7", ours.run.dir / "checkpoints/global_step_7")
    with pytest.raises(ConfigError, match=r"global_step_7 is a checkpoint of run \w+, this is run \w+: remove it, or"):
        resume(ours)
    assert resume(make_config(ours.run.dir, run__resume=str(copied))) == 7
    assert resume(ours) == 7


def test_resuming_from_what_is_no_checkpoint_is_a_mistake_of_the_user(store: CheckpointStore) -> None:
    with pytest.raises(ConfigError, match=r"run\.resume: nowhere/global_step_3 is no complete checkpoint"):
        start(store, run__resume="nowhere/global_step_3")


def test_the_state_before_the_first_step_comes_from_the_config(store: CheckpointStore) -> None:
    point = start(store, algorithm__kl_coef=0.125)
    assert (point.state, point.metrics) == (RunState(step=0, kl_coef=0.125), None)


@pytest.mark.parametrize(
    ("content", "place"),
    [
        ('{"state": {"step": 1, "kl_coef": "high"}, "metrics": {}}', "kl_coef: "),
        ('{"state": {"step": 1, "kl_coef": 0.5, "mood": "good"}, "metrics": {}}', "mood: "),
        ('{"metrics": {}}', "state: "),
        ("[]", ""),
        ("{", ""),
    ],
)
def test_a_state_that_this_version_cannot_read_is_one_sentence(
    store: CheckpointStore, content: str, place: str
) -> None:
    save(store, 1)
    (store.folder(1) / "controller.json").write_text(content)
    with pytest.raises(ConfigError, match=rf"global_step_1 cannot be used, its controller\.json .*{place}"):
        store.load(1)


def test_a_damaged_checkpoint_that_is_named_is_the_users_mistake(store: CheckpointStore, tmp_path: Path) -> None:
    other = CheckpointStore(tmp_path / "other")
    save(other, 7)
    (other.folder(7) / "controller.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"run\.resume: .*global_step_7 is damaged: .*controller\.json"):
        start(store, run__resume=str(other.folder(7)))
    assert store.steps() == []


def test_what_a_crash_has_left_is_removed_and_named(store: CheckpointStore, caplog: pytest.LogCaptureFixture) -> None:
    save(store, 1)
    (store.folder(2) / "actor").mkdir(parents=True)
    assert start(store).step == 1
    assert not store.folder(2).exists()
    assert "removed the checkpoint of step 2: COMMITTED is missing, it was never completed" in caplog.text
