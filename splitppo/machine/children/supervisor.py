"""A process that runs a program, and ends with it all that the program has started, in whatever group or session.

    parent                    supervisor (`run_with`), twice      program
    starts it  ------------>  adopts what loses its parent  --->  starts what it likes
    SIGTERM, or its end --->  SIGTERM, and 1 s later  --------->  ends what should not outlive it
                              kills all that is left, and ends

There are two supervisors, one the parent of the other: a program that kills one of them, by its pid or with all of its
process group, ends with all that it has started by the other one. Only one that kills both gets away.

It needs the standard library, and psutil only if the program has left something running.
"""

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NoReturn

from splitppo.machine.children.ending import exit_status_of
from splitppo.machine.children.parent import end_with

_PR_SET_CHILD_SUBREAPER = 36  # of Linux' prctl
_GRACE_S = 1.0  # of a program
_INNER_GRACE_S = 2.5  # of the supervisor that ends the program
_KILL_LIMIT_S = 5.0
_PAUSE_S = 0.005


def supervised(command: tuple[str, ...], parent_pid: int) -> list[str]:
    """Returns the command line of a supervisor that runs a command, and ends with this parent."""
    call = f"from splitppo.machine.children.supervisor import run_with; run_with({parent_pid})"
    return [sys.executable, "-P", "-S", "-c", f"import sys; sys.path[:] = {sys.path!r}; {call}", *command]


def run_with(parent_pid: int) -> NoReturn:
    """Runs the program that the arguments of this process name, and ends with its exit status, as a shell's.

    SIGTERM ends both, and so does the end of the parent.
    """
    for number in (signal.SIGINT, signal.SIGPIPE):  # Python's own ways with them would be inherited
        signal.signal(number, signal.SIG_DFL)
    outer_pid = os.getpid()
    _supervise(parent_pid, lambda: _fork_inner(outer_pid), _INNER_GRACE_S)


def _fork_inner(outer_pid: int) -> int:
    """Forks the supervisor that runs the program, and returns its pid."""
    inner_pid = os.fork()
    if inner_pid == 0:
        try:
            os.setpgid(0, 0)  # a signal to the program's group does not reach the outer one
            _supervise(outer_pid, _start_program, _GRACE_S)
        finally:
            os._exit(1)
    return inner_pid


def _start_program() -> int:
    return os.spawnvp(os.P_NOWAIT, sys.argv[1], sys.argv[1:])  # noqa: S606


def _supervise(parent_pid: int, start: Callable[[], int], grace_s: float) -> NoReturn:
    """Starts a child, and ends as it does, on SIGTERM, or with the parent; nothing that it has started is left then."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)  # what left its group and lost its parent is found, too
    started = list[int]()
    signal.signal(signal.SIGTERM, lambda *_: _end_started(started, grace_s))
    end_with(parent_pid, signal.SIGTERM)
    started.append(start())
    _, status = os.waitpid(started[0], 0)
    _end(exit_status_of(os.waitstatus_to_exitcode(status)))


def _end_started(children: Sequence[int], grace_s: float) -> NoReturn:
    """Asks the child to end, and gives it a moment for that, then ends; `children` is empty before its start."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    deadline_s = time.monotonic() + grace_s
    for program in children:
        with suppress(ProcessLookupError, ChildProcessError):  # it has ended, and its exit code was taken
            os.kill(program, signal.SIGTERM)
            while os.waitpid(program, os.WNOHANG) == (0, 0) and time.monotonic() < deadline_s:
                time.sleep(_PAUSE_S)
    _end(1)


def _end(status: int) -> NoReturn:
    """Kills all that has been started and still runs, then ends this process."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    deadline_s = time.monotonic() + _KILL_LIMIT_S
    while _has_children() and time.monotonic() < deadline_s:
        _kill_descendants()
        time.sleep(_PAUSE_S)
    os._exit(status)


def _has_children() -> bool:
    """Returns True if a child still runs; takes the exit codes of those that have ended."""
    try:
        while os.waitpid(-1, os.WNOHANG) != (0, 0):
            pass
    except ChildProcessError:
        return False
    return True


def _kill_descendants() -> None:
    """Stops all that runs, so that it starts nothing more, and kills it."""
    import psutil  # late: slow to import, and mostly there is nothing to kill

    from splitppo.machine.children.tree import descendants, kill

    victims = descendants(os.getpid())
    for victim in victims:
        try:
            victim.suspend()
        except psutil.Error:
            continue
    kill(victims)
