"""Whenever the controller is killed, nothing that it has started lives on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from controller.process_tree import descendants
from tests.chaos.orphans import kill_and_look
from tests.kill_matrix.harness import matrix_config
from tests.runs import Controller, Inputs

pytestmark = pytest.mark.slow


def torchrun_starts(controller: Controller) -> bool:
    return bool(descendants(controller.process.pid))


def ranks_start(controller: Controller) -> bool:
    """Two agents and three ranks are there, and have not said yet who they are."""
    return len(descendants(controller.process.pid)) >= 5


def the_run_is_under_way(controller: Controller) -> bool:
    return 1 in controller.folder.steps


@pytest.mark.parametrize(
    "moment", [torchrun_starts, ranks_start, pytest.param(the_run_is_under_way, marks=pytest.mark.extended)]
)
def test_five_seconds_after_a_killed_controller_none_of_its_processes_is_left(
    inputs: Inputs, tmp_path: Path, moment: Callable[[Controller], bool]
) -> None:
    config = {**matrix_config(inputs), "run": {"total_steps": 10_000}}
    num_processes, left = kill_and_look(config, tmp_path / "run", moment)
    assert num_processes
    assert left == []
