"""Ending a tree of processes, also if some are stopped."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from splitppo.machine.children.tree import descendants, find_processes, is_running, is_stopped, kill_tree, wait_gone
from tests.support.groups import wait_until

# Two generations in sessions of their own, as torchrun starts its ranks.
PARENT = """
import subprocess, sys, time
if len(sys.argv) > 1:
    subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"], start_new_session=True)
time.sleep(60)
"""


def test_stopped_processes_of_any_session_end_with_their_root() -> None:
    root = subprocess.Popen([sys.executable, "-S", "-c", PARENT, "with a child"])
    wait_until(lambda: descendants(root.pid), what="a child")
    (child,) = descendants(root.pid)
    child.suspend()
    wait_until(lambda: is_stopped(child.pid), what="the stopped child")
    victims = kill_tree(root.pid)
    assert [victim.pid for victim in victims] == [root.pid, child.pid]
    root.wait()
    assert asyncio.run(wait_gone(victims, 30.0)) == []
    assert not is_running(child)


async def test_what_does_not_end_is_named() -> None:
    this_process = find_processes([os.getpid()])
    assert await wait_gone(this_process, 0.1) == this_process


def test_a_process_that_was_never_there_is_not_found() -> None:
    assert find_processes([2**22 + 1]) == descendants(2**22 + 1) == kill_tree(2**22 + 1) == []
    assert not is_stopped(2**22 + 1)


def test_a_process_that_nobody_has_waited_for_has_ended() -> None:
    ends = subprocess.Popen([sys.executable, "-S", "-c", "pass"])
    [process] = find_processes([ends.pid])
    wait_until(lambda: not is_running(process), what="the end")
    assert process not in descendants(os.getpid())
    ends.wait()
    assert not is_running(process)


# A name of any bytes, and of what else /proc/PID/stat is made of.
STRANGER = """
import time
open("/proc/self/comm", "wb").write(bytes([0xFF, 0xE9]) + b") Z (")
time.sleep(60)
"""


def test_a_process_may_be_called_anything() -> None:
    stranger = subprocess.Popen([sys.executable, "-S", "-c", STRANGER])
    try:
        comm = Path(f"/proc/{stranger.pid}/comm")
        wait_until(lambda: comm.read_bytes().startswith(b"\xff\xe9"), what="the name")
        [process] = find_processes([stranger.pid])
        assert is_running(process)
        assert process in descendants(os.getpid())
    finally:
        stranger.kill()
        stranger.wait()


def test_the_root_ends_also_where_its_descendants_cannot_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: object) -> Any:
        raise PermissionError("hidden")

    root = subprocess.Popen([sys.executable, "-S", "-c", PARENT])
    try:
        with monkeypatch.context() as patch:
            patch.setattr(os, "listdir", refuse)
            assert [victim.pid for victim in kill_tree(root.pid)] == [root.pid]
        assert root.wait(30) == -signal.SIGKILL
    finally:
        root.kill()
        root.wait()


def test_the_lifeline_of_torchrun_waits_for_no_large_library() -> None:
    imported = "import sys, services.runtime.group.torchrun; print(*{name.partition('.')[0] for name in sys.modules})"
    output = subprocess.run([sys.executable, "-c", imported], check=True, capture_output=True, text=True).stdout
    assert not {"grpc", "numpy", "google", "pydantic", "torch"} & {*output.split()}
