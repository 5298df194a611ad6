"""No process outlives a controller that is killed, at whatever moment."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import pytest

from splitppo.machine.children.tree import descendants
from tests.chaos.orphans import kill_and_look
from tests.kill_matrix.harness import matrix_config
from tests.support.runs import Controller, Inputs


def commands(controller: Controller) -> list[str]:
    """The command lines of all that the controller has started."""
    files = (Path(f"/proc/{below.pid}/cmdline") for below in descendants(controller.process.pid))
    found = []
    for file in files:
        with contextlib.suppress(OSError):  # it has ended
            found.append(file.read_bytes().replace(b"\0", b" ").decode())
    return found


def torchrun_starts(controller: Controller) -> bool:
    return any("services.runtime.group.torchrun" in command for command in commands(controller))


def ranks_start(controller: Controller) -> bool:
    """All three ranks have begun, and have not said yet who they are."""
    return sum(command.startswith("services.") and " rank " in command for command in commands(controller)) == 3


def template_starts(controller: Controller) -> bool:
    return any("services.runtime.group.template" in command for command in commands(controller))


def the_run_is_under_way(controller: Controller) -> bool:
    return 1 in controller.folder.steps


@pytest.mark.parametrize(
    "moment",
    [
        ranks_start,
        *(
            pytest.param(at, marks=pytest.mark.extended)
            for at in (template_starts, torchrun_starts, the_run_is_under_way)
        ),
    ],
)
def test_five_seconds_after_a_killed_controller_none_of_its_processes_is_left(
    inputs: Inputs, tmp_path: Path, moment: Callable[[Controller], bool]
) -> None:
    config = {**matrix_config(inputs), "run": {"total_steps": 10_000}}
    num_processes, left = kill_and_look(config, tmp_path / "run", moment)
    assert num_processes
    assert left == []
