"""Locks of which a process takes any that is free."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from splitppo.file_lock import any_lock, try_lock

HOLD = """
import pathlib, sys, time
from splitppo.file_lock import any_lock
with any_lock([pathlib.Path(sys.argv[1])]):
    print("locked", flush=True)
    time.sleep(600)
"""


def test_who_comes_too_much_waits_until_any_lock_is_free(tmp_path: Path) -> None:
    files = [tmp_path / "first", tmp_path / "second"]

    def take() -> None:
        with any_lock(files):
            pass

    with ThreadPoolExecutor(1) as thread, any_lock(files):
        with any_lock(files):
            third = thread.submit(take)
            with pytest.raises(TimeoutError):
                third.result(0.5)
        third.result(60)


def test_without_locks_nobody_waits() -> None:
    with any_lock([]), any_lock([]):
        pass


def test_a_killed_process_leaves_no_lock_behind(tmp_path: Path) -> None:
    file = tmp_path / "lock"
    with subprocess.Popen([sys.executable, "-c", HOLD, str(file)], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"locked\n"
        with file.open("a") as opened:
            assert not try_lock(opened)
        holder.kill()
    with file.open("a") as opened:
        assert try_lock(opened)
