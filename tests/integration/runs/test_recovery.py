"""Runs in which something dies, freezes or fails end with the weights of an undisturbed one, without a person."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.kill_matrix.cells import CELLS, STEP, Cell
from tests.kill_matrix.harness import Verdict, fired_marks, matrix_config, run_cell, undisturbed_digests
from tests.runs import Inputs, RunFolder, started

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

# One per victim at least, and every moment once; `make kill-matrix` runs all of them.
NAMES = (
    "actor_0-generating",
    "actor_1-between_mini_batches",
    "critic_0-computing_values",
    "critic_0-after_update_before_reply",
    "actor_0-writing_checkpoint",
    "critic_0-between_parts_of_commit",
    "controller-before_update",
)
BOTH = {"actor", "critic"}


@pytest.fixture(scope="module")
def matrix(inputs: Inputs) -> dict[str, Any]:
    return matrix_config(inputs)


@pytest.fixture(scope="module")
def undisturbed(matrix: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return undisturbed_digests(matrix, tmp_path_factory.mktemp("undisturbed") / "run")


def with_services(config: dict[str, Any], **services: Any) -> dict[str, Any]:
    return {**config, "services": {**config["services"], **services}}


def controller_log(run: Path) -> str:
    return RunFolder(run).log("controller_0")


@pytest.mark.parametrize("cell", [cell for cell in CELLS if cell.name in NAMES], ids=lambda cell: cell.name)
def test_a_killed_process_costs_no_more_than_time(
    cell: Cell, matrix: dict[str, Any], undisturbed: dict[str, str], tmp_path: Path
) -> None:
    assert run_cell(cell, matrix, tmp_path / "run").failures(undisturbed) == []


def test_a_frozen_rank_is_named_and_its_group_starts_again(
    matrix: dict[str, Any], undisturbed: dict[str, str], tmp_path: Path
) -> None:
    cell = Cell("actor_1", "frozen", "actor.update.mini_batch", action="stop")
    verdict = run_cell(cell, with_services(matrix, progress_timeout_s=10.0), tmp_path / "run")
    assert verdict.failures(undisturbed) == []
    named = f"recovering in 0.1 s: actor rank 1, step {STEP}, Update (update): rank 1 failed in step {STEP}, Update"
    assert named in controller_log(tmp_path / "run")


def test_a_group_that_dies_while_the_other_one_starts_is_noticed_at_once(
    matrix: dict[str, Any], undisturbed: dict[str, str], tmp_path: Path
) -> None:
    with started(matrix, tmp_path / "run") as controller:
        controller.wait_until(lambda folder: 1 in folder.steps, "the line of step 1")
        os.kill(controller.folder.pids("critic")[0], signal.SIGKILL)
        log = "started the critic group"
        controller.wait_until(lambda folder: folder.log("controller_0").count(log) == 2, "the critic's second start")
        os.kill(controller.folder.pids("actor")[0], signal.SIGKILL)
        folder = controller.complete()
    assert folder.log("controller_0").count("started the actor group") == 2
    assert ": actor: the group has ended" in folder.log("controller_0")
    assert folder.summary["weights_sha256"] == undisturbed


def test_a_frozen_group_is_ended_and_starts_again(
    matrix: dict[str, Any], undisturbed: dict[str, str], tmp_path: Path
) -> None:
    cell = Cell("critic_0", "frozen", "critic.update.mini_batch", action="stop")
    verdict = run_cell(cell, matrix, tmp_path / "run")
    assert verdict.failures(undisturbed) == []
    assert f"recovering in 0.1 s: critic rank 0, step {STEP}, Update (update): " in controller_log(tmp_path / "run")


def test_an_update_whose_client_gave_up_in_the_middle_is_applied_once_and_answered(
    matrix: dict[str, Any], undisturbed: dict[str, str], tmp_path: Path
) -> None:
    def wake_up(run: RunFolder) -> None:
        """Once the controller has lost the connection, and sends the request again."""
        if (fired := fired_marks(run)) and "calling again: actor" in run.log("controller_0"):
            with contextlib.suppress(ProcessLookupError):  # the run has ended
                os.kill(fired[0]["pid"], signal.SIGCONT)

    cell = Cell("actor_0", "frozen", "actor.update.mini_batch", action="stop")
    patient = with_services(matrix, reconnect_timeout_s=120.0)
    verdict = run_cell(cell, patient, tmp_path / "run", wake_up)
    assert verdict.failures(undisturbed) == []
    assert verdict.kept == BOTH
    assert num_restarts(tmp_path / "run") == 0


def test_an_update_that_fails_before_its_first_optimizer_step_is_sent_again_and_nothing_else(
    matrix: dict[str, Any], undisturbed: dict[str, str], tmp_path: Path
) -> None:
    cell = Cell("critic_0", "out_of_memory", "critic.update.begin", action="out_of_memory")
    verdict: Verdict = run_cell(cell, matrix, tmp_path / "run")
    assert verdict.failures(undisturbed) == []
    assert verdict.kept == BOTH
    assert num_restarts(tmp_path / "run") == 0
    assert "the update has changed nothing, sending it again: critic" in controller_log(tmp_path / "run")


def test_an_update_that_fails_half_way_takes_both_roles_back_to_the_last_common_checkpoint(
    matrix: dict[str, Any], undisturbed: dict[str, str], tmp_path: Path
) -> None:
    cell = Cell("critic_0", "dirty", "critic.update.mini_batch", action="raise")
    verdict = run_cell(cell, matrix, tmp_path / "run")
    assert verdict.failures(undisturbed) == []
    assert verdict.kept == BOTH, "the models stay loaded"
    assert num_restarts(tmp_path / "run") == 1
    for role in BOTH:
        assert "LoadCheckpoint done" in RunFolder(tmp_path / "run").log(f"{role}_0")


def num_restarts(run: Path) -> float:
    return float(RunFolder(run).metrics[-1]["recovery/num_restarts"])
