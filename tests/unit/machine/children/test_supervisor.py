"""A supervisor ends with a program all that the program has started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from splitppo.machine.children.supervisor import supervised
from tests.support.groups import PROJECT

pytestmark = pytest.mark.slow

# Starts two processes that leave its session, and says who they are; `ends`: then ends itself.
PROGRAM = """
import os, signal, subprocess, sys, time
children = [subprocess.Popen(["sleep", "1000"], start_new_session=True) for _ in range(2)]
if sys.argv[1] == "cleans":
    def clean(*_):
        open(sys.argv[2], "w").write("clean")
        sys.exit()
    signal.signal(signal.SIGTERM, clean)
if sys.argv[1] == "ignores":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(os.getpid(), *(child.pid for child in children), flush=True)
if sys.argv[1] == "ends":
    sys.exit(7)
time.sleep(1000)
"""


def started(tmp_path: Path, kind: str) -> tuple[subprocess.Popen[str], list[int]]:
    """Starts the program below a supervisor; returns that, and the processes below it."""
    command = supervised((sys.executable, "-c", PROGRAM, kind, str(tmp_path / "cleaned")), os.getpid())
    supervisor = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert supervisor.stdout is not None
    return supervisor, [int(pid) for pid in supervisor.stdout.readline().split()]


def has_ended(pid: int) -> bool:
    """Returns whether a process ends within 10 s."""
    return until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)


def until(holds: Callable[[], bool]) -> bool:
    """Waits up to 10 s until something holds."""
    deadline_s = time.monotonic() + 10.0
    while not holds() and time.monotonic() < deadline_s:
        time.sleep(0.02)
    return holds()


def test_what_a_program_leaves_running_ends_with_it_and_its_exit_code_is_passed_on(tmp_path: Path) -> None:
    supervisor, pids = started(tmp_path, "ends")
    assert supervisor.wait(20) == 7
    assert [has_ended(pid) for pid in pids] == [True] * 3


@pytest.mark.parametrize("kind", ["cleans", "ignores"])
def test_a_program_is_asked_to_end_and_then_killed_with_all_that_it_has_started(tmp_path: Path, kind: str) -> None:
    supervisor, pids = started(tmp_path, kind)
    supervisor.send_signal(signal.SIGTERM)
    supervisor.wait(20)
    assert [has_ended(pid) for pid in pids] == [True] * 3
    assert (tmp_path / "cleaned").exists() == (kind == "cleans")


def test_a_program_ends_with_the_parent_of_its_supervisor(tmp_path: Path) -> None:
    parent = f"""
import os, subprocess, sys, time
from splitppo.machine.children.supervisor import supervised
subprocess.Popen(supervised((sys.executable, "-c", {PROGRAM!r}, "waits"), os.getpid()), start_new_session=True)
time.sleep(1000)
"""
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True, cwd=PROJECT) as process:
        assert process.stdout is not None
        pids = [int(pid) for pid in process.stdout.readline().split()]
        process.kill()
    assert [has_ended(pid) for pid in pids] == [True] * 3
