"""Ends a process and all that it has started, wherever in /proc they are, also those that are stopped."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

_POLL_INTERVAL_S = 0.02


def is_running(pid: int) -> bool:
    """Whether a process exists and has not ended; one that nobody has waited for yet has."""
    return _state_and_parent(pid)[0] not in ("", "Z", "X")


def descendants(pid: int) -> list[int]:
    """The living processes that this one has started, and theirs; each before those that it has started."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (parent := _state_and_parent(int(entry.name))[1]):
            children.setdefault(parent, []).append(int(entry.name))
    found = [pid]
    for one in found:
        found += children.get(one, [])
    return [one for one in found[1:] if is_running(one)]


def kill_tree(pid: int, others: Iterable[int] = ()) -> list[int]:
    """SIGKILL to a process of ours that has not been waited for, and to its descendants; returns their pids.

    Args:
        pid: the root.
        others: processes that may have lost their parent already.
    """
    # Stopped first, lest it starts another one meanwhile.
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)
    victims = [*dict.fromkeys((pid, *descendants(pid), *others))]
    for victim in victims:
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL)
    return victims


async def wait_gone(pids: Iterable[int], timeout_s: float) -> list[int]:
    """Waits until none of them runs; returns those that still do."""
    left = [*pids]
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        left = [pid for pid in left if is_running(pid)]
        if not left:
            break
        await asyncio.sleep(_POLL_INTERVAL_S)
    return left


def _state_and_parent(pid: int) -> tuple[str, int]:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "", 0
    return fields[0], int(fields[1])
