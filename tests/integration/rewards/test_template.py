"""The template of child processes is killed in mid-fork, or the machine gives it no further process."""

from __future__ import annotations

import asyncio
import pickle
from pathlib import Path

import pytest

from rewards import forks
from rewards.forks import Template
from rewards.process import WorkerProcess
from tests.support.groups import is_alive, wait_until

LIMIT_S = 20.0

# What a template imports: its children report their pid.
CHILD = """
import os, pickle
from pathlib import Path
from splitppo.machine.children.parent import end_with

FORKS = Path(__file__).with_suffix(".forks")
REFUSES = Path(__file__).with_suffix(".refuses")
{before}

def serve(channel):
    end_with(channel.controller_pid)
    channel.send(pickle.dumps(os.getpid()))
    channel.receive()
"""

KILLED_IN_ITS_FIRST_FORK = """
fork = os.fork
def kill_at_first():
    is_first = not FORKS.exists()
    if pid := fork():
        with FORKS.open("a") as file:
            file.write(f"{pid}\\n")
        if is_first:
            os.kill(os.getpid(), 9)
    return pid
os.fork = kill_at_first
"""

REFUSED = """
fork = os.fork
def refuse():
    if REFUSES.exists():
        REFUSES.with_suffix(".refused").touch()
        raise BlockingIOError(11, "Resource temporarily unavailable")
    return fork()
os.fork = refuse
"""


def worker(template: Template, serve: str) -> WorkerProcess:
    return WorkerProcess(serve, (), pickle.loads, LIMIT_S, template=template)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


async def test_a_child_whose_template_was_killed_before_it_told_the_pid_takes_nothing_from_the_next(
    folder: Path,
) -> None:
    (folder / "orphaned.py").write_text(CHILD.format(before=KILLED_IN_ITS_FIRST_FORK))
    template = Template("orphaned:serve")
    process = worker(template, "orphaned:serve")
    try:
        pid = await process.load()
        orphan, child = map(int, (folder / "orphaned.forks").read_text().split())
        assert pid == child
        await asyncio.to_thread(wait_until, lambda: not is_alive(orphan), what="the end of the orphan")
    finally:
        await process.end()
        template.end()


async def test_a_refused_fork_is_asked_for_again_and_ends_no_other_child(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "refusing.py").write_text(CHILD.format(before=REFUSED))
    refuses = folder / "refusing.refuses"
    template = Template("refusing:serve")
    first, second, third = (worker(template, "refusing:serve") for _ in range(3))
    try:
        pid = await first.load()
        refuses.touch()
        load = asyncio.create_task(second.load())
        await asyncio.to_thread(wait_until, (folder / "refusing.refused").exists, what="a refusal")
        refuses.unlink()
        assert await load != pid
        assert is_alive(pid)
        refuses.touch()
        monkeypatch.setattr(forks, "_REFUSED_S", 0.0)
        with pytest.raises(ChildProcessError, match=r"^could not be forked: .*Resource temporarily unavailable$"):
            await third.load()
        assert is_alive(pid)
    finally:
        for process in (first, second, third):
            await process.end()
        template.end()
