"""Runs whose ranks divide the positions of rows: schedules, resumes and lost ranks leave the weights alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kill_matrix.cells import Cell
from tests.kill_matrix.harness import matrix_config, run_cells
from tests.support.external import ExternalGroups, external_groups
from tests.support.runs import Inputs, RunFolder, started

# Runs of adapters divide rows in the short suite.
pytestmark = [pytest.mark.extended, pytest.mark.timeout(600)]

SERIAL, GATHER, OVERLAP = (f"run.schedule={schedule}" for schedule in ("serial", "gather", "overlap"))
COMPUTING = Cell("actor_3", "computing", "actor.compute_log_probs", step=2)
LEARNING = Cell("critic_1", "between_mini_batches", "critic.update.mini_batch", step=3)


@pytest.fixture(scope="module")
def together(inputs: Inputs) -> dict[str, Any]:
    """Two times two actor ranks, beside the reference, and two critic ranks, beside a reward model."""
    config = matrix_config(inputs, critic={"num_processes": 2})
    config["services"]["actor"] = {"num_processes": 4}
    return {**config, **{role: {**config[role], "ulysses_sequence_parallel_size": 2} for role in ("actor", "critic")}}


@pytest.fixture(scope="module")
def groups(together: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ExternalGroups]:
    with external_groups(together, tmp_path_factory.mktemp("together") / "run") as groups:
        yield groups


@pytest.fixture(scope="module")
def whole(groups: ExternalGroups, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A run without a break."""
    return groups.completed(tmp_path_factory.mktemp("whole") / "run", SERIAL, "rollout.check_freq=1")


def test_the_ranks_compute_the_log_probs_that_each_of_them_has_sampled_with(whole: RunFolder) -> None:
    assert max(line["training/rollout_probs_diff_max"] for line in whole.metrics) <= 1e-5


def test_a_run_resumes_bit_for_bit_under_every_schedule(whole: RunFolder, groups: ExternalGroups) -> None:
    assert groups.resumed(OVERLAP, GATHER).summary["weights_sha256"] == whole.summary["weights_sha256"]


def test_ranks_without_results_of_their_own_may_die(whole: RunFolder, together: dict[str, Any], tmp_path: Path) -> None:
    verdict = run_cells([COMPUTING, LEARNING], together, tmp_path / "run")
    assert verdict.failures(whole.summary["weights_sha256"]) == []


def test_one_rank_each_learns_the_same(whole: RunFolder, together: dict[str, Any], tmp_path: Path) -> None:
    apart = [f"{role}.ulysses_sequence_parallel_size=1" for role in ("actor", "critic")]
    with started(together, tmp_path / "run", *apart, "run.stop_after_step=2") as controller:
        folder = controller.complete()
    names = ("actor/loss", "actor/grad_norm", "critic/loss", "critic/grad_norm", "critic/score/mean")
    for found, expected in zip(folder.metrics, whole.metrics[:2], strict=True):
        values = {name: expected[name] for name in names if name in expected}  # step 1 trains the critic alone
        assert {name: found[name] for name in values} == pytest.approx(values, rel=1e-3, abs=1e-6)
    assert "actor/loss" in values
