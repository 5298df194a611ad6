"""A run goes on with another number of ranks, in both roles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.support.runs import EACH_STEP, NUM_STEPS, SAVED, RunFolder, started

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

Completed = Callable[[str, int], RunFolder]
Copied = Callable[[RunFolder], RunFolder]


def losses(folder: RunFolder, step: int) -> list[float]:
    (line,) = [line for line in folder.metrics if line["step"] == step]
    return [line["actor/loss"], line["critic/loss"], line["actor/grad_norm"], line["critic/grad_norm"]]


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
    with started(config, folder.path, f"run.total_steps={last_step}") as reloading:
        one_rank = reloading.complete()
        assert len(one_rank.pids("actor")) == 1
        assert one_rank.steps == two_ranks.steps
        assert one_rank.summary["weights_sha256"] == two_ranks.summary["weights_sha256"]
    with started(config, folder.path, f"run.total_steps={last_step + 1}") as going_on:
        assert going_on.complete().steps == [*two_ranks.steps, last_step + 1]
