"""Starts the process of a role in a container or pod, passes signals on to it, and restarts a killed controller.

This module needs the standard library and splitppo.machine.children only.
"""

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from types import FrameType

from deploy.checks import EXIT_BAD_INPUT, Refused
from deploy.placement import PORTS
from splitppo.machine.children.ending import exit_code_of, exit_status_of

MAX_RESTARTS = 5
RESTART_PAUSE_S = 2.0


def module_of(role: str) -> str:
    """Returns the Python module that starts a worker group or the controller."""
    return "controller" if role == "controller" else f"services.{role}"


def run_role(
    role: str, command_of: Callable[[], list[str] | None], run_group: Callable[[str, "Child", Sequence[str]], int]
) -> int:
    """Runs the command line of a role, if the role has something to do; returns the exit code.

    Args:
        role: a worker group, the controller, or a role that prepares their files.
        command_of: returns the command, None if there is nothing to do; Refused ends with EXIT_BAD_INPUT.
        run_group: runs the command of a group.
    """
    try:
        command = command_of()
    except Refused as refused:
        say(f"error: {refused}")
        return EXIT_BAD_INPUT
    if command is None:
        return 0
    child = Child()
    if role == "controller":
        return run_controller(lambda: child.run(command))
    return run_group(role, child, command) if role in PORTS else child.run(command)


def run_controller(run: Callable[[], int], pause_s: float = RESTART_PAUSE_S) -> int:
    """Runs the controller, again if SIGKILL has ended it, and returns its exit code.

    A SIGKILL to the whole container would end this process, too. So the controller alone was killed, for instance for
    lack of memory, and the run is resumed, at most MAX_RESTARTS times.
    """
    code = run()
    for restart in range(1, MAX_RESTARTS + 1):
        if exit_code_of(code) != -signal.SIGKILL:
            break
        say(f"the controller was killed: starting it again ({restart} of {MAX_RESTARTS}), to resume the run")
        time.sleep(pause_s)
        code = run()
    return code


class Child:
    """The child process of an entry point, one at a time; SIGTERM and SIGINT are passed on to the child.

    Attributes:
        last_signal: the last signal that has come, to this process or by `end`; nothing is started after it.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self.last_signal: int | None = None
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._hand_on)

    def _hand_on(self, number: int, _: FrameType | None = None) -> None:
        self.last_signal = number
        if self._process is not None:
            self._process.send_signal(number)

    def end(self) -> None:
        """Sends SIGTERM to the child process, which then ends in order; no further process is started."""
        self._hand_on(signal.SIGTERM)

    def run(self, command: Sequence[str]) -> int:
        """Runs a command as the child process, waits for its end, and returns its exit code.

        The code is 128 + n if signal n has ended the command, or has come before it was started.
        """
        if self.last_signal is not None:
            return exit_status_of(-self.last_signal)
        process = subprocess.Popen(command)
        self._process = process
        if self.last_signal is not None:
            process.send_signal(self.last_signal)
        code = process.wait()
        self._process = None
        return exit_status_of(code)


def say(sentence: str) -> None:
    """Writes one line of text to stderr, without buffering."""
    sys.stderr.write(f"{sentence}\n")
    sys.stderr.flush()
