"""A run goes on with another number of ranks, in both roles, and with another mesh or strategy."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.runs import EACH_STEP, NUM_STEPS, SAVED, RunFolder, started

pytestmark = pytest.mark.timeout(900)

Completed = Callable[[str, int], RunFolder]
Copied = Callable[[RunFolder], RunFolder]


def losses(folder: RunFolder, step: int) -> list[float]:
    (line,) = [line for line in folder.metrics if line["step"] == step]
    return [line["actor/loss"], line["critic/loss"], line["actor/grad_norm"], line["critic/grad_norm"]]


@pytest.mark.extended
def test_a_run_of_one_rank_in_each_role_goes_on_with_two(
    completed: Completed, stopped: RunFolder, copied: Copied, config: dict[str, Any]
) -> None:
    undisturbed = completed("gather", 1)
    more_ranks = [f"services.{role}.num_processes=2" for role in ("actor", "critic")]
    with started(config, copied(stopped).path, EACH_STEP, *more_ranks) as controller:
        folder = controller.complete()
        assert {role: len(folder.pids(role)) for role in ("actor", "critic")} == {"actor": 2, "critic": 2}
    assert f"resumed after step {SAVED[-1]}" in controller.output
    assert folder.steps == list(range(NUM_STEPS + 1))
    assert losses(folder, SAVED[-1]) == losses(undisturbed, SAVED[-1])
    assert losses(folder, NUM_STEPS) == pytest.approx(losses(undisturbed, NUM_STEPS), rel=1e-4)


@pytest.mark.extended
def test_two_ranks_are_reloaded_by_one_bit_for_bit_and_go_on(
    completed: Completed, copied: Copied, config: dict[str, Any]
) -> None:
    two_ranks = completed("gather", 2)
    last_step = two_ranks.steps[-1]
    folder = copied(two_ranks)
    (folder.path / "summary.json").unlink()  # with it, nothing would be left to do
    with started(config, folder.path, f"run.total_steps={last_step}") as reloading:
        one_rank = reloading.complete()
        assert len(one_rank.pids("actor")) == 1
        assert one_rank.steps == two_ranks.steps
        assert one_rank.summary["weights_sha256"] == two_ranks.summary["weights_sha256"]
    with started(config, folder.path, f"run.total_steps={last_step + 1}") as going_on:
        assert going_on.complete().steps == [*two_ranks.steps, last_step + 1]


@pytest.mark.extended
@pytest.mark.parametrize("schedules", [("gather", "overlap"), ("serial", "overlap")])
def test_a_run_goes_on_over_a_mesh_with_replicas_under_any_schedule_and_then_with_whole_weights(
    schedules: tuple[str, ...], completed: Completed, stopped: RunFolder, config: dict[str, Any], tmp_path: Path
) -> None:
    mesh = ["services.actor.num_processes=4", "actor.fsdp_size=2"]
    last_step = f"run.total_steps={NUM_STEPS + 1}"
    digests = []
    for schedule in schedules:
        copy = shutil.copytree(stopped.path, tmp_path / schedule)
        with started(config, copy, EACH_STEP, *mesh, last_step, f"run.schedule={schedule}") as controller:
            folder = controller.complete()
            assert len(folder.pids("actor")) == 4
        assert folder.steps == list(range(NUM_STEPS + 2))
        assert losses(folder, NUM_STEPS) == pytest.approx(losses(completed("gather", 1), NUM_STEPS), rel=1e-4)
        digests.append(folder.summary["weights_sha256"])

    ddp = ["services.actor.num_processes=2", "actor.strategy=ddp"]
    with started(config, copy, *ddp, last_step) as reloading:
        digests.append(reloading.complete().summary["weights_sha256"])
    assert digests == digests[:1] * 3
