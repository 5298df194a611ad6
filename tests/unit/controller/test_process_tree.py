"""A tree of processes is ended, also where some are stopped."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys

from controller.process_tree import descendants, is_running, kill_tree, wait_gone
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
