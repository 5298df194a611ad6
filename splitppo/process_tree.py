"""Ends a process and all that it has started, wherever in /proc they are, also those that are stopped."""

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

log = logging.getLogger(__name__)

_POLL_INTERVAL_S = 0.02
# Positions in /proc/PID/stat behind the command's name.
_STATE, _PARENT, _START_TIME = 0, 1, 19


def is_running(pid: int, since: int | None = None) -> bool:
    """Whether a process exists and has not ended; one that nobody has waited for yet has.

    `since` is its `start_time`: a later process under the same pid is another one.
    """
    fields = _stat(pid)
    return bool(fields) and fields[_STATE] not in "ZX" and since in (None, int(fields[_START_TIME]))


def start_time(pid: int) -> int:
    """When a process was started, in clock ticks since the machine was; -1 if there is none."""
    fields = _stat(pid)
    return int(fields[_START_TIME]) if fields else -1


def descendants(pid: int) -> list[int]:
    """The living processes that this one has started, and theirs; each before those that it has started."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (fields := _stat(int(entry.name))):
            children.setdefault(int(fields[_PARENT]), []).append(int(entry.name))
    found = [pid]
    for one in found:
        found += children.get(one, [])
    return [one for one in found[1:] if is_running(one)]


def kill_tree(pid: int, others: Iterable[int] = ()) -> list[int]:
    """SIGKILL to a process of ours that has not been waited for, and to its descendants; returns their pids.

    The process is killed also where its descendants cannot be found; `others` may have lost their parent already.
    """
    # Stopped first, lest it starts another one meanwhile.
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)
    try:
        below = descendants(pid)
    except (OSError, ValueError) as error:
        log.error("what process %d has started cannot be found: %s", pid, error)
        below = []
    return kill([*dict.fromkeys((pid, *below, *others))])


def kill(pids: Iterable[int]) -> list[int]:
    """SIGKILL to processes, also where some have ended already; returns all of them."""
    victims = [*pids]
    for victim in victims:
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL)
    return victims


async def wait_gone(pids: Iterable[int], timeout_s: float) -> list[int]:
    """Waits until none of them runs; returns those that still do."""
    left, deadline = [*pids], time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if not (left := [pid for pid in left if is_running(pid)]):
            break
        await asyncio.sleep(_POLL_INTERVAL_S)
    return left


def _stat(pid: int) -> list[str]:
    """What /proc/PID/stat says behind the command's name, which is any bytes; empty if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []
