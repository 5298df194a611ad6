"""Makes the kernel send this process a signal when its parent ends, for whatever reason, also by SIGKILL (prctl).

The standard library is enough, so that any process can do this first.
"""

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1  # of Linux' prctl


def signal_at_end_of_parent(number: int) -> None:
    """Asks for this signal when the parent ends: its thread that has started this process, to be exact.

    SIGCONT wakes a process that is stopped (SIGSTOP), so that it can see for itself that the parent has ended.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def end_with(parent_pid: int, number: int = signal.SIGKILL) -> None:
    """Asks for a signal, by default SIGKILL, when the parent ends; if it has ended already, this process exits."""
    signal_at_end_of_parent(number)
    if os.getppid() != parent_pid:
        os._exit(1)
