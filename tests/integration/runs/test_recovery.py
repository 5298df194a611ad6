"""Runs in which a process dies, freezes or fails recover by themselves, and end with the same weights."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.kill_matrix.cells import Cell, cells_at
from tests.kill_matrix.harness import fired_mark_of, matrix_config, run_cells, undisturbed_digests, with_incidents
from tests.support.groups import is_alive, wait_until
from tests.support.meetings import is_paused, let_go, pause_at
from tests.support.runs import NUM_LONG_STEPS, Inputs, RunFolder, started

pytestmark = pytest.mark.timeout(1200)

# One per victim.
VICTIMS = (
    "actor_1-streaming",
    "critic_0-after_update_before_reply",
    "actor_0-writing_checkpoint",
    "controller-before_update",
)
# Every moment once; `make kill-matrix` runs all cells, each in a run of its own.
MOMENTS = (
    "actor_0-generating",
    "actor_1-streaming",
    "actor_1-between_mini_batches",
    "critic_0-computing_values",
    "critic_0-after_update_before_reply",
    "actor_0-writing_checkpoint",
    "critic_0-between_parts_of_commit",
    "controller-before_update",
)
FIRST_STEP = 2
FROZEN = Cell("actor_1", "frozen", "actor.update.mini_batch", action="stop")
# These groups go on: their processes are as they were.
OUT_OF_MEMORY = Cell("critic_0", "out_of_memory", "critic.update.begin", action="out_of_memory", ends_process=False)
DIRTY = Cell("critic_0", "dirty", "critic.update.mini_batch", action="raise", ends_process=False)


def test_the_incidents_are_cells_of_the_matrix_and_cover_every_victim_and_moment() -> None:
    cells = cells_at(FIRST_STEP)
    assert {cells[name].victim for name in VICTIMS} == {cell.victim for cell in cells.values()}
    assert {cells[name].moment for name in MOMENTS} == {cell.moment for cell in cells.values()}


@pytest.mark.promise("any process may be killed")
@pytest.mark.promise("the same command resumes")
@pytest.mark.parametrize(
    "names", [VICTIMS, pytest.param(MOMENTS, marks=pytest.mark.extended)], ids=["victims", "moments"]
)
def test_one_kill_after_the_other_costs_no_more_than_time(
    names: Sequence[str], two_ranks: dict[str, Any], completed: Callable[[str, int], RunFolder], tmp_path: Path
) -> None:
    cells = [cells_at(step)[name] for step, name in enumerate(names, FIRST_STEP)]
    folder = run_to_the_same_end(cells, with_incidents(two_ranks), completed, tmp_path)
    assert_losses_are_on_record(folder, cells)


def test_a_frozen_rank_and_updates_that_fail_cost_no_more_than_time(
    two_ranks: dict[str, Any], completed: Callable[[str, int], RunFolder], tmp_path: Path
) -> None:
    frozen, out_of_memory, dirty = (
        replace(cell, step=step) for step, cell in enumerate((FROZEN, OUT_OF_MEMORY, DIRTY), FIRST_STEP)
    )
    config = with_incidents(two_ranks, progress_timeout_s=15.0)
    folder = run_to_the_same_end([frozen, out_of_memory, dirty], config, completed, tmp_path)
    assert_losses_are_on_record(folder, [frozen, dirty])
    log = folder.log("controller_0")
    named = f"actor rank 1, step {frozen.step}, Update (update): rank 1 failed in step {frozen.step}, Update"
    assert f"recovering in 0.1 s: {named}" in log
    assert "the update has changed nothing, sending it again: critic" in log
    # The line of an earlier step may count both: it is written again where its checkpoint was not complete in time.
    lost = [event["step"] for event in folder.events if event["kind"] == "group_lost"]
    assert lost == [frozen.step, dirty.step]  # and none in the step whose update ran out of memory
    assert folder.metrics[-1]["recovery/num_restarts"] == len(lost)
    assert folder.summary["this_start"]["resumed_at_step"] == 0


def run_to_the_same_end(
    cells: Sequence[Cell], config: dict[str, Any], completed: Callable[[str, int], RunFolder], tmp_path: Path
) -> RunFolder:
    """Makes a run with one incident after the other, and checks that it has the weights of a run without."""
    assert cells[-1].step < NUM_LONG_STEPS
    verdict = run_cells(cells, config, tmp_path / "run")
    assert verdict.failures(completed("gather", 2).summary["weights_sha256"]) == []
    log = verdict.folder.log("controller_0")
    assert log.count("back to ") == log.count("steps made again: ") == log.count("recovering in ") > 0
    for role in ("actor", "critic"):
        assert "LoadCheckpoint done" in verdict.folder.log(f"{role}_0")
    return verdict.folder


def assert_losses_are_on_record(folder: RunFolder, cells: Sequence[Cell]) -> None:
    """Each with its cause, and what it has cost; the controller's own end is its next start."""
    of_groups = [cell for cell in cells if cell.role != "controller"]
    by_kind: dict[str, list[dict[str, Any]]] = {}
    for event in folder.events:
        by_kind.setdefault(event["kind"], []).append(event)
    lost, recoveries, recovered = (by_kind[kind] for kind in ("group_lost", "recovery", "recovered"))
    assert [event["role"] for event in lost] == [cell.role for cell in of_groups]
    assert len(by_kind["start"]) == 1 + len(cells) - len(of_groups)
    log = folder.log("controller_0")
    assert all(f"recovering in 0.1 s: {event['cause']}" in log for event in lost)
    for cell, recovery in zip(of_groups, recoveries, strict=True):
        assert recovery["restarted"] == [cell.role] * cell.ends_process
        assert {*recovery["restarted"], *recovery["kept"]} == {"actor", "critic"}
        assert recovery["pause_s"] == 0.1
    last = [event["repeated_steps"] for event in recovered if event["epoch"] == by_kind["start"][-1]["epoch"]]
    assert sum(last) == folder.metrics[-1]["recovery/num_repeated_steps"]
    assert {span[2] for event in by_kind["cut"] for span in event["spans"]}
    trained = {int(file.stem) for file in folder.path.glob("rollouts/train/*.parquet")}
    assert trained == {step for step in folder.steps if step}


@pytest.mark.extended
def test_a_rank_that_dies_while_the_controller_waits_for_no_answer_is_named(
    two_ranks: dict[str, Any], tmp_path: Path
) -> None:
    point, step = "controller.actor.update.begin", 2
    config = {**with_incidents(two_ranks), "debug": {"failpoints": pause_at(point, [step])}}
    with started(config, tmp_path / "run", f"run.stop_after_step={step}") as controller:
        controller.wait_until(lambda folder: is_paused(folder.path, point, step), "the moment before a call")
        rank_0, rank_1 = controller.folder.pids("actor")
        os.kill(rank_1, signal.SIGKILL)
        wait_until(lambda: not is_alive(rank_0), what="the end of rank 0, which has answered nobody")
        let_go(controller.folder.path, step)
        folder = controller.complete()
    [said] = [line for line in folder.log("controller_0").splitlines() if "recovering in" in line]
    assert f"; a peer rank died: rank 1, pid {rank_1}; the group ends" in said


@pytest.fixture(scope="module")
def matrix(inputs: Inputs) -> dict[str, Any]:
    return matrix_config(inputs)


@pytest.fixture(scope="module")
def undisturbed(matrix: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return undisturbed_digests(matrix, tmp_path_factory.mktemp("undisturbed") / "run")


@pytest.mark.extended
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
    assert ": actor rank 0: the group has ended; actor rank 0 was ended by SIGKILL" in folder.log("controller_0")
    assert folder.summary["weights_sha256"] == undisturbed


@pytest.mark.extended
def test_a_frozen_group_is_ended_and_starts_again(
    matrix: dict[str, Any], undisturbed: dict[str, str], tmp_path: Path
) -> None:
    cell = Cell("critic_0", "frozen", "critic.update.mini_batch", action="stop")
    verdict = run_cells([cell], matrix, tmp_path / "run")
    assert verdict.failures(undisturbed) == []
    log = verdict.folder.log("controller_0")
    assert f"recovering in 0.1 s: critic rank 0, step {cell.step}, Update (update): " in log


@pytest.mark.extended
def test_an_update_whose_client_gave_up_in_the_middle_is_applied_once_and_answered(
    matrix: dict[str, Any], undisturbed: dict[str, str], tmp_path: Path
) -> None:
    cell = Cell("actor_0", "frozen", "actor.update.mini_batch", action="stop", ends_process=False)

    def wake_up(run: RunFolder) -> None:
        """Once the controller has lost the connection, and sends the request again."""
        if (mark := fired_mark_of(cell, run)) and "calling again: actor" in run.log("controller_0"):
            with contextlib.suppress(ProcessLookupError):  # the run has ended
                os.kill(mark["pid"], signal.SIGCONT)

    services = {**matrix["services"], "reconnect_timeout_s": 120.0}
    verdict = run_cells([cell], {**matrix, "services": services}, tmp_path / "run", wake_up)
    assert verdict.failures(undisturbed) == []
    assert verdict.folder.metrics[-1]["recovery/num_restarts"] == 0
