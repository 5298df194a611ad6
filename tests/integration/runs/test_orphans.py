"""Whenever the controller is killed, nothing that it has started lives on."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.orphans import kill_and_look
from tests.kill_matrix.harness import matrix_config
from tests.runs import Inputs


@pytest.mark.slow
@pytest.mark.parametrize("delay_s", [1.5, 6.0, 20.0], ids=["torchrun starts", "ranks start", "the run is under way"])
def test_five_seconds_after_a_killed_controller_none_of_its_processes_is_left(
    inputs: Inputs, tmp_path: Path, delay_s: float
) -> None:
    config = {**matrix_config(inputs), "run": {"total_steps": 10_000}}
    num_processes, left = kill_and_look(config, tmp_path / "run", delay_s)
    assert left == []
    assert num_processes or delay_s < 5.0
