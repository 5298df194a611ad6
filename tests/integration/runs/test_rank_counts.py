"""A run goes on with more ranks than it began with, in both roles."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.runs import RunFolder, started

pytestmark = [pytest.mark.slow, pytest.mark.extended, pytest.mark.timeout(600)]

STOP, NUM_STEPS = 2, 4


def losses(folder: RunFolder, step: int) -> list[float]:
    (line,) = [line for line in folder.metrics if line["step"] == step]
    return [line["actor/loss"], line["critic/loss"], line["actor/grad_norm"], line["critic/grad_norm"]]


def test_a_run_of_one_rank_in_each_role_goes_on_with_two(config: dict[str, Any], tmp_path: Path) -> None:
    overrides = ("actor.ppo_epochs=1", "critic.ppo_epochs=1", "evaluation.test_freq=-1")
    with started(config, tmp_path / "undisturbed", *overrides) as controller:
        undisturbed = controller.complete()
    with started(config, tmp_path / "run", *overrides, f"run.stop_after_step={STOP}") as first:
        folder = first.complete()
        assert {role: len(folder.pids(role)) for role in ("actor", "critic")} == {"actor": 1, "critic": 1}
    more_ranks = [f"services.{role}.num_processes=2" for role in ("actor", "critic")]
    with started(config, tmp_path / "run", *overrides, *more_ranks) as second:
        folder = second.complete()
        assert {role: len(folder.pids(role)) for role in ("actor", "critic")} == {"actor": 2, "critic": 2}
    assert f"resumed after step {STOP}" in second.output
    assert folder.steps == list(range(NUM_STEPS + 1))
    assert losses(folder, STOP) == losses(undisturbed, STOP)
    assert losses(folder, STOP + 1) == pytest.approx(losses(undisturbed, STOP + 1), rel=1e-4)
