"""Waits for child processes, ends them with what they have started, and says how they ended."""

import os
import select
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

_DYING_S = 5.0  # a killed process may need this long until it is gone
_POLL_INTERVAL_S = 0.01
_FIRST_SIGNAL_STATUS = 128  # a shell's exit status: 128 + the signal that ended a process


class Process(Protocol):
    """A child as its parent has it, e.g. `subprocess.Popen` or `Forked`.

    Until its exit code is taken, by `poll` or `wait`, no other process gets its pid.

    Attributes:
        returncode: the exit code that was taken, negative for a signal; None before.
    """

    pid: int
    returncode: int | None

    def poll(self) -> int | None:
        """Takes and returns the exit code; None while the process runs."""

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the end, and takes the exit code; subprocess.TimeoutExpired after `timeout` seconds."""


def keep_exit_codes() -> None:
    """Makes this process learn how its children end; some launchers make theirs ignore SIGCHLD, and then none does."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def exit_code_within(process: Process, limit_s: float) -> int | None:
    """Waits up to `limit_s` seconds for the end of a child; returns its exit code, None if it still runs."""
    with suppress(subprocess.TimeoutExpired):
        return process.wait(limit_s)
    return None


async def has_ended_within(process: Process, limit_s: float) -> bool:
    """Waits up to `limit_s` seconds, without a thread, for the end of a child; returns True if it has ended."""
    import asyncio  # late: it is slow to import, and few callers wait so

    deadline_s = time.monotonic() + limit_s
    while process.poll() is None and time.monotonic() < deadline_s:  # noqa: ASYNC110 - of a child's child nobody tells
        await asyncio.sleep(_POLL_INTERVAL_S)
    return process.poll() is not None


def end(process: Process, grace_s: float = 0.0, *, kill: Callable[[int], object] | None = None) -> int | None:
    """Gives a child `grace_s` seconds to end by itself, then kills what is left of it, and waits until it is gone.

    `kill` gets the pid; by default it kills the session of a child that leads one. `tree.kill_tree` kills what a child
    that has not ended by itself has started, in any session.

    Returns:
        The exit code of a child that has ended by itself; None if it was killed.
    """
    has_ended = _ends_within(process, grace_s)
    (kill or kill_session)(process.pid)
    exit_code = exit_code_within(process, _DYING_S)
    return exit_code if has_ended else None


def kill_session(pid: int) -> None:
    """Sends SIGKILL to a child and to all of its session, also if the child has ended and nobody has waited for it."""
    for kill in (os.killpg, os.kill):
        with suppress(ProcessLookupError):
            kill(pid, signal.SIGKILL)


def _ends_within(process: Process, limit_s: float) -> bool:
    """Waits up to `limit_s` seconds for the end of a child, without taking its exit code: its pid stays its own."""
    if process.returncode is not None:
        return True
    try:
        descriptor = os.pidfd_open(process.pid)
    except ProcessLookupError:  # a child of another process that has gone
        return True
    try:
        poller = select.poll()
        poller.register(descriptor, select.POLLIN)
        return bool(poller.poll(limit_s * 1000))
    finally:
        os.close(descriptor)


def how_it_ended(exit_code: int) -> str:
    """Returns how a process has ended, in words; a negative exit code stands for a signal, as in subprocess."""
    if exit_code < 0:
        return f"was ended by {signal_name(-exit_code)}"
    return f"ended with exit code {exit_code}"


def signal_name(number: int) -> str:
    """Returns the name of a signal, e.g. SIGKILL; "signal 35" for one without a name."""
    return next((known.name for known in signal.Signals if known == number), f"signal {number}")


def exit_status_of(exit_code: int) -> int:
    """Returns the exit status by which a shell passes an exit code on: 128 + n for signal n."""
    return exit_code if exit_code >= 0 else _FIRST_SIGNAL_STATUS - exit_code


def exit_code_of(status: int) -> int:
    """Returns the exit code that a shell's exit status stands for, negative for a signal."""
    return _FIRST_SIGNAL_STATUS - status if status > _FIRST_SIGNAL_STATUS else status
