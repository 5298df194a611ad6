"""A run with damaged checkpoints goes on from the pair before, with a warning, or ends with one sentence."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support import models
from tests.support.checkpoints import cut, empty, flip, remove
from tests.support.disks import mounted, remount
from tests.support.external import ExternalGroups
from tests.support.groups import wait_until
from tests.support.runs import EACH_STEP, NUM_STEPS, SAVED, RunFolder, started

pytestmark = pytest.mark.timeout(900)

Completed = Callable[[str, int], RunFolder]


def damaged(folder: RunFolder) -> set[str]:
    return {entry.name for entry in (folder.path / "checkpoints").glob("damaged_*")}


@pytest.mark.parametrize(
    ("file", "damage", "seen_by"),
    [
        ("actor/__0_0.distcp", flip, "the service"),
        pytest.param("critic/.metadata", remove, "the service", marks=pytest.mark.extended),
        pytest.param("critic/manifest.json", flip, "the controller", marks=pytest.mark.extended),
        ("COMMITTED", cut, "the controller"),
    ],
)
def test_a_run_goes_on_from_the_pair_before_a_damaged_one_and_ends_the_same(
    completed: Completed,
    stopped: RunFolder,
    groups: ExternalGroups,
    file: str,
    damage: Callable[[Path], None],
    seen_by: str,
) -> None:
    folder = groups.put_back(stopped)
    damage(folder.checkpoint(3) / file)
    with groups.started(EACH_STEP) as controller:
        folder = controller.complete()
    (warning,) = [line for line in controller.output.splitlines() if "is damaged" in line]
    assert f"{folder.checkpoint(3) / file}: " in warning
    assert warning.endswith("was renamed to damaged_global_step_3; the one before is used: step 2")
    undisturbed = completed("gather", 1)
    assert folder.summary["weights_sha256"] == undisturbed.summary["weights_sha256"]
    assert folder.steps == list(range(NUM_STEPS + 1))
    assert [line["actor/reward_kl_penalty_coeff"] for line in folder.metrics[1:]] == [
        line["actor/reward_kl_penalty_coeff"] for line in undisturbed.metrics[1:]
    ]
    assert folder.committed_steps == [1, 2, 3, 4]
    assert damaged(folder) == {"damaged_global_step_3"}


def test_without_any_whole_pair_a_run_starts_again_and_ends_the_same(
    completed: Completed, stopped: RunFolder, groups: ExternalGroups
) -> None:
    folder = groups.put_back(stopped)
    for step, (name, damage) in zip(
        SAVED, [("actor/__0_0.distcp", cut), ("controller.json", empty), ("critic/__0_0.distcp", flip)], strict=True
    ):
        damage(folder.checkpoint(step) / name)
    with groups.started(EACH_STEP) as controller:
        folder = controller.complete()
    assert "NONE IS LEFT, the run starts again at step 0 with the initial models" in controller.output
    assert folder.summary["weights_sha256"] == completed("gather", 1).summary["weights_sha256"]
    assert folder.steps == list(range(NUM_STEPS + 1))


@pytest.mark.extended
def test_a_checkpoint_of_another_model_is_refused_and_untouched(
    stopped: RunFolder, config: dict[str, Any], tmp_path: Path
) -> None:
    wider = models.save_policy(tmp_path / "wider", hidden_size=48)
    with started(config, tmp_path / "run", f"actor.model={wider}", f"run.resume={stopped.checkpoint(3)}") as controller:
        assert controller.wait() == 2, controller.output
    (sentence,) = controller.errors
    assert "the checkpoint of step 3 cannot be loaded: actor" in sentence
    assert "holds qwen2 with hidden_size 32, " in sentence
    assert "expected qwen2 with hidden_size 48, " in sentence
    assert "Traceback" not in controller.output
    assert controller.folder.committed_steps == [3]
    assert stopped.committed_steps == SAVED


def test_a_damaged_checkpoint_that_was_asked_for_by_name_is_refused_and_untouched(
    stopped: RunFolder, groups: ExternalGroups
) -> None:
    folder = groups.put_back(stopped)
    cut(folder.checkpoint(2) / "critic" / "__0_0.distcp")
    with groups.started(f"run.resume={folder.checkpoint(2)}") as controller:
        assert controller.wait() == 2
    (sentence,) = controller.errors
    assert f"run.resume: the checkpoint {folder.checkpoint(2)} is damaged: " in sentence
    assert "critic/__0_0.distcp: expected " in sentence
    assert "Traceback" not in controller.output
    assert folder.committed_steps == SAVED


@pytest.mark.extended
def test_a_folder_that_turns_read_only_costs_one_sentence_and_no_checkpoint(
    completed: Completed, config: dict[str, Any], tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    with mounted(run_dir / "checkpoints", "size=64m") as disk:
        with started(config, run_dir, EACH_STEP, "run.total_steps=100") as first:
            first.wait_until(lambda folder: 2 in folder.committed_steps, "two checkpoints")
            wait_until(lambda: remount(disk, "ro"), 60.0, "a moment in which nothing is written")
            assert first.wait() == 1, first.output
        (sentence,) = first.errors
        assert "Read-only file system" in sentence
        last = first.folder.committed_steps[-1]
        assert f"the last good checkpoint is {first.folder.checkpoint(last)}, which is untouched" in sentence
        assert "Traceback" not in first.output
        # It was noticed at the next step, not at the end of the run.
        assert first.folder.steps[-1] <= last + 2
        assert remount(disk, "rw")
        with started(config, run_dir, EACH_STEP, f"run.total_steps={last + 1}") as second:
            folder = second.complete()
        assert f"resumed after step {last}" in second.output
        assert not list(disk.glob("*/*.tmp"))
    assert folder.steps == list(range(last + 2))
    for line, undisturbed in zip(folder.metrics[1:], completed("gather", 1).metrics[1:], strict=False):
        assert line["critic/loss"] == undisturbed["critic/loss"]


def test_half_a_pair_is_removed_and_named_at_the_next_start(stopped: RunFolder, groups: ExternalGroups) -> None:
    folder = groups.put_back(stopped)
    half = shutil.copytree(folder.checkpoint(3), folder.checkpoint(7))
    (half / "COMMITTED").unlink()
    shutil.rmtree(half / "critic")
    with groups.started(f"run.stop_after_step={SAVED[-1]}") as controller:
        controller.complete()
    assert "removed the checkpoint of step 7: COMMITTED is missing, it was never completed" in controller.output
    assert not half.exists()
    assert folder.committed_steps == SAVED
