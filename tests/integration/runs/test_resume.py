"""A run that stops and goes on ends where an undisturbed one does, bit for bit."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.runs import NUM_STEPS, STEPS_PER_EPOCH, RunFolder, started, wait_all_ended

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


def test_a_run_stopped_at_an_epoch_boundary_goes_on(
    completed: Completed, config: dict[str, Any], tmp_path: Path
) -> None:
    with started(config, tmp_path / "run", f"run.stop_after_step={STEPS_PER_EPOCH}") as first:
        assert first.complete().steps == list(range(STEPS_PER_EPOCH + 1))
    with started(config, tmp_path / "run") as second:
        assert_same_end(second.complete(), completed("gather", 1))
    assert f"resumed after step {STEPS_PER_EPOCH}" in second.output


def test_two_ranks_are_reloaded_by_one_bit_for_bit(
    completed: Completed, config: dict[str, Any], copied: Callable[[RunFolder], RunFolder]
) -> None:
    two_ranks = completed("gather", 2)
    folder = copied(two_ranks)
    with started(config, folder.path, "services.actor.num_processes=1") as controller:
        one_rank = controller.complete()
    assert len(one_rank.pids("actor")) == 1
    assert one_rank.steps == two_ranks.steps
    assert one_rank.summary["weights_sha256"] == two_ranks.summary["weights_sha256"]


def test_a_killed_controller_leaves_no_process_and_its_run_goes_on(
    completed: Completed, config: dict[str, Any], tmp_path: Path
) -> None:
    with started(config, tmp_path / "run", "checkpoint.save_freq=1", "evaluation.test_freq=2") as first:
        first.wait_until(has_line_of(2), "the line of step 2")
        ranks = first.folder.rank_pids
        assert len(ranks) == 2
        first.process.send_signal(signal.SIGKILL)
        wait_all_ended(ranks)
    with started(config, tmp_path / "run", "checkpoint.save_freq=1", "evaluation.test_freq=2") as second:
        assert_same_end(second.complete(), completed("gather", 1))
    assert "resumed after step 2" in second.output


def test_killed_ranks_are_restarted_and_the_run_ends_the_same(
    completed: Completed, config: dict[str, Any], tmp_path: Path
) -> None:
    with started(config, tmp_path / "run", "checkpoint.save_freq=1", "run.schedule=overlap") as controller:
        for role, step in (("actor", 1), ("critic", 3)):
            controller.wait_until(has_line_of(step), f"the line of step {step}")
            (pid,) = controller.folder.pids(role)
            os.kill(pid, signal.SIGKILL)
            controller.wait_until(lambda folder, old=pid, role=role: folder.pids(role) != [old], f"a new {role}")
        folder = controller.complete()
    assert_same_end(folder, completed("overlap", 1))


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_finishes_the_step_saves_and_leaves(
    config: dict[str, Any], tmp_path: Path, number: signal.Signals, status: int
) -> None:
    with started(config, tmp_path / "run", "run.total_steps=1000", "checkpoint.save_freq=-1") as controller:
        controller.wait_until(has_line_of(1), "the line of step 1")
        processes = controller.children()
        controller.process.send_signal(number)
        assert controller.wait() == status, controller.output
        wait_all_ended(processes)
    summary = controller.folder.summary
    assert summary["exit_reason"] == "interrupted"
    assert controller.folder.committed_steps == [summary["global_step"]] == [controller.folder.steps[-1]]
