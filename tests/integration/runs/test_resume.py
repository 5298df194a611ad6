"""A run that stops and goes on ends where an undisturbed one does, bit for bit."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.runs import NUM_STEPS, ON_TWO_RANKS, STEPS_PER_EPOCH, RunFolder, started

# One test may have to make several runs first; on a busy machine they take their time.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

Completed = Callable[[str, int], RunFolder]


def has_line_of(step: int) -> Callable[[RunFolder], bool]:
    return lambda folder: step in folder.steps


def assert_same_end(folder: RunFolder, undisturbed: RunFolder) -> None:
    """Same weights, every step once, the validation of step 0 and the KL coefficients kept."""
    assert folder.steps == list(range(NUM_STEPS + 1))
    assert folder.summary["weights_sha256"] == undisturbed.summary["weights_sha256"]
    assert folder.summary["validation"] == undisturbed.summary["validation"]
    name = "actor/reward_kl_penalty_coeff"
    assert [line[name] for line in folder.metrics[1:]] == [line[name] for line in undisturbed.metrics[1:]]
    assert folder.summary["tokens"] == undisturbed.summary["tokens"]


def test_a_run_stopped_at_an_epoch_boundary_goes_on_under_another_schedule(
    completed: Completed, config: dict[str, Any], tmp_path: Path
) -> None:
    with started(config, tmp_path / "run", f"run.stop_after_step={STEPS_PER_EPOCH}") as first:
        assert first.complete().steps == list(range(STEPS_PER_EPOCH + 1))
    with started(config, tmp_path / "run", "run.schedule=overlap") as second:
        assert_same_end(second.complete(), completed("gather", 1))
    assert f"resumed after step {STEPS_PER_EPOCH}" in second.output


def test_two_ranks_are_reloaded_by_one_bit_for_bit_and_go_on(
    completed: Completed, config: dict[str, Any], copied: Callable[[RunFolder], RunFolder]
) -> None:
    two_ranks, on_one_rank = completed("gather", 2), [*ON_TWO_RANKS, "services.actor.num_processes=1"]
    folder = copied(two_ranks)
    with started(config, folder.path, *on_one_rank) as reloading:
        one_rank = reloading.complete()
        assert len(one_rank.pids("actor")) == 1
        assert one_rank.steps == two_ranks.steps
        assert one_rank.summary["weights_sha256"] == two_ranks.summary["weights_sha256"]
    with started(config, folder.path, *on_one_rank, "run.total_steps=5") as going_on:
        assert going_on.complete().steps == [*two_ranks.steps, NUM_STEPS + 1]


def test_a_killed_controller_leaves_no_process_and_its_run_goes_on_from_the_last_whole_checkpoint(
    completed: Completed, config: dict[str, Any], tmp_path: Path
) -> None:
    overrides = ["checkpoint.save_freq=1", *ON_TWO_RANKS]
    with started(config, tmp_path / "run", *overrides, "run.total_steps=100") as first:
        first.wait_until(has_line_of(2), "the line of step 2")
        assert len(first.folder.rank_pids) == 3
        first.process.kill()
        first.wait_nothing_is_left()
    saved_step = first.folder.committed_steps[-1]
    assert saved_step >= 2
    half = shutil.copytree(
        first.folder.checkpoint(saved_step), first.folder.checkpoint(saved_step + 1), dirs_exist_ok=True
    )
    (half / "COMMITTED").unlink()
    with started(config, tmp_path / "run", *overrides) as second:
        assert_same_end(second.complete(), completed("gather", 2))
    assert f"resumed after step {saved_step}" in second.output


def test_killed_ranks_are_restarted_and_the_run_ends_the_same(
    completed: Completed, config: dict[str, Any], tmp_path: Path
) -> None:
    overrides = ["checkpoint.save_freq=1", "run.schedule=overlap", *ON_TWO_RANKS]
    with started(config, tmp_path / "run", *overrides) as controller:
        for step, (role, rank) in ((1, ("actor", 1)), (2, ("critic", 0))):
            controller.wait_until(has_line_of(step), f"the line of step {step}")
            before = {known: controller.folder.pids(known) for known in ("actor", "critic")}
            os.kill(before[role][rank], signal.SIGKILL)
            controller.wait_until(
                lambda folder, old=before[role], role=role: not set(folder.pids(role)) & set(old), f"a new {role}"
            )
            (other,) = before.keys() - {role}
            assert controller.folder.pids(other) == before[other]
        folder = controller.complete()
    assert_same_end(folder, completed("overlap", 2))


@pytest.mark.parametrize(
    ("number", "status", "schedule"), [(signal.SIGINT, 130, "overlap"), (signal.SIGTERM, 143, "gather")]
)
def test_a_signal_finishes_the_step_saves_and_leaves(
    completed: Completed, config: dict[str, Any], tmp_path: Path, number: signal.Signals, status: int, schedule: str
) -> None:
    overrides = ["run.total_steps=1000", "checkpoint.save_freq=-1", f"run.schedule={schedule}"]
    with started(config, tmp_path / "run", *overrides) as controller:
        controller.wait_until(has_line_of(1), "the line of step 1")
        controller.signal(number)
        assert controller.wait() == status, controller.output
        controller.wait_nothing_is_left()
    folder = controller.folder
    assert folder.summary["exit_reason"] == "interrupted"
    assert folder.committed_steps == [folder.summary["global_step"]] == [folder.steps[-1]]
    assert None not in folder.summary["weights_sha256"].values()
    for line, undisturbed in zip(folder.metrics[1:], completed("gather", 1).metrics[1:], strict=False):
        assert line["actor/loss"] == undisturbed["actor/loss"]
        assert line["critic/loss"] == undisturbed["critic/loss"]


def test_a_second_signal_leaves_at_once_even_if_the_step_cannot_be_finished(
    config: dict[str, Any], tmp_path: Path
) -> None:
    with started(config, tmp_path / "run", "run.total_steps=1000", "algorithm.adv_estimator=grpo") as controller:
        controller.wait_until(has_line_of(1), "the line of step 1")
        (rank,) = controller.folder.pids("actor")
        os.kill(rank, signal.SIGSTOP)
        controller.signal(signal.SIGINT)
        controller.wait_until(lambda _: "finishing step" in controller.output, "an answer to the first")
        controller.signal(signal.SIGINT)
        assert controller.wait() == 130, controller.output
        os.kill(rank, signal.SIGCONT)
        controller.wait_nothing_is_left()
    assert controller.folder.summary["exit_reason"] == "interrupted"
    assert controller.folder.committed_steps == []
