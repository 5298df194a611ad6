"""Children that end by themselves or are ended, and how they ended."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from splitppo.machine.children.ending import (
    end,
    exit_code_of,
    exit_code_within,
    exit_status_of,
    has_ended_within,
    how_it_ended,
    keep_exit_codes,
)
from splitppo.machine.children.tree import kill_tree
from tests.support.groups import is_alive, wait_until

SLEEP = "import time; time.sleep(60)"
# Starts a process, in the same session or in one of its own, and writes its pid.
WITH_CHILD = f"""
import pathlib, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-S", "-c", {SLEEP!r}], start_new_session=bool(int(sys.argv[2])))
pathlib.Path(sys.argv[1]).write_text(str(child.pid))
time.sleep(float(sys.argv[3]))
"""


def start(code: str, *arguments: object) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-S", "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, start_new_session=True)


def started_with_child(folder: Path, *, own_session: bool, sleep_s: float) -> tuple[subprocess.Popen[bytes], int]:
    file = folder / "pid"
    process = start(WITH_CHILD, file, int(own_session), sleep_s)
    wait_until(lambda: file.exists() and file.read_text(), what="the child of the child")
    return process, int(file.read_text())


@pytest.mark.parametrize(
    ("code", "exit_code"), [("raise SystemExit(3)", 3), ("import os; os.kill(os.getpid(), 9)", -9)]
)
def test_a_child_that_ends_by_itself_keeps_its_exit_code(code: str, exit_code: int) -> None:
    assert end(start(code), 30.0) == exit_code


def test_a_child_that_does_not_end_in_time_is_killed_and_waited_for() -> None:
    process = start(SLEEP)
    assert exit_code_within(process, 0.0) is None
    assert end(process, 0.1) is None
    assert process.returncode == -signal.SIGKILL
    assert end(process) == -signal.SIGKILL  # it has ended by now


def test_a_stopped_child_is_killed() -> None:
    process = start(SLEEP)
    process.send_signal(signal.SIGSTOP)
    assert end(process) is None
    assert process.returncode == -signal.SIGKILL


@pytest.mark.parametrize("sleep_s", [0.0, 60.0], ids=["ended by itself", "killed"])
def test_what_is_left_of_its_session_ends_with_a_child(tmp_path: Path, sleep_s: float) -> None:
    process, child = started_with_child(tmp_path, own_session=False, sleep_s=sleep_s)
    assert end(process, 0.0 if sleep_s else 30.0) == (None if sleep_s else 0)
    wait_until(lambda: not is_alive(child), what="the end of the rest")


def test_what_has_a_session_of_its_own_ends_with_a_child_that_is_killed_as_a_tree(tmp_path: Path) -> None:
    process, child = started_with_child(tmp_path, own_session=True, sleep_s=60.0)
    assert end(process, kill=kill_tree) is None
    wait_until(lambda: not is_alive(child), what="the end of the rest")


async def test_the_end_of_a_child_is_awaited_up_to_a_limit() -> None:
    began_s = time.monotonic()
    process = start(SLEEP)
    assert not await has_ended_within(process, 0.1)
    process.kill()
    assert await has_ended_within(process, 30.0)
    assert time.monotonic() - began_s < 30.0


def test_exit_codes_are_known_also_where_the_launcher_ignores_the_end_of_children() -> None:
    code = (
        "import signal, subprocess, sys; from splitppo.machine.children.ending import keep_exit_codes;"
        f"{'{}'}; print(subprocess.run([sys.executable, '-S', '-c', 'raise SystemExit(3)']).returncode)"
    )

    def said(call: str) -> str:
        command = [sys.executable, "-c", code.format(call)]
        ignore = {"preexec_fn": lambda: signal.signal(signal.SIGCHLD, signal.SIG_IGN)}
        return subprocess.run(command, capture_output=True, text=True, check=True, **ignore).stdout.strip()  # type: ignore[call-overload]

    assert said("pass") == "0"
    assert said(f"{keep_exit_codes.__name__}()") == "3"


@pytest.mark.parametrize(
    ("exit_code", "status", "words"),
    [
        (0, 0, "ended with exit code 0"),
        (3, 3, "ended with exit code 3"),
        (-signal.SIGKILL, 137, "was ended by SIGKILL"),
        (-(signal.SIGRTMIN + 1), 163, f"was ended by signal {signal.SIGRTMIN + 1}"),
    ],
)
def test_an_exit_code_has_words_and_a_status_for_shells(exit_code: int, status: int, words: str) -> None:
    assert how_it_ended(exit_code) == words
    assert exit_status_of(exit_code) == status
    assert exit_code_of(status) == exit_code


def test_what_any_process_may_import_first_needs_neither_psutil_nor_asyncio() -> None:
    modules = ", ".join(f"splitppo.machine.children.{name}" for name in ("ending", "forks", "parent", "start", "title"))
    code = f"import sys; before = set(sys.modules); import {modules}; print(*(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert {"asyncio", "numpy", "psutil"}.isdisjoint(done.stdout.split())
    assert "splitppo.machine.children.title" in done.stdout.split()
