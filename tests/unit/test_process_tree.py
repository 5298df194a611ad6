"""A tree of processes is ended, also where some are stopped."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from splitppo.process_tree import descendants, is_running, kill_tree, start_time, wait_gone
from tests.groups import wait_until

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
    os.kill(child, signal.SIGSTOP)
    assert kill_tree(root.pid) == [root.pid, child]
    root.wait()
    assert asyncio.run(wait_gone([root.pid, child], 30.0)) == []
    assert not is_running(child)


async def test_what_does_not_end_is_named() -> None:
    assert await wait_gone([os.getpid()], 0.1) == [os.getpid()]


def test_a_process_that_was_never_there_does_not_run() -> None:
    assert not is_running(2**22 + 1)


def test_a_later_process_under_the_same_pid_is_another_one() -> None:
    started = start_time(os.getpid())
    assert started > 0
    assert is_running(os.getpid(), started)
    assert not is_running(os.getpid(), started - 1)
    assert start_time(2**22 + 1) == -1


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
        assert is_running(stranger.pid)
        assert stranger.pid in descendants(os.getpid())
    finally:
        stranger.kill()
        stranger.wait()


def test_the_root_ends_also_where_its_descendants_cannot_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Path) -> Any:
        raise PermissionError("hidden")

    root = subprocess.Popen([sys.executable, "-S", "-c", PARENT])
    try:
        with monkeypatch.context() as patch:
            patch.setattr(Path, "iterdir", refuse)
            assert kill_tree(root.pid) == [root.pid]
        assert root.wait(30) == -signal.SIGKILL
    finally:
        root.kill()
        root.wait()


def test_the_lifeline_of_torchrun_waits_for_no_large_library() -> None:
    imported = "import sys, services.runtime.torchrun; print(*{name.partition('.')[0] for name in sys.modules})"
    output = subprocess.run([sys.executable, "-c", imported], check=True, capture_output=True, text=True).stdout
    assert not {"grpc", "numpy", "google", "pydantic", "torch"} & {*output.split()}
