"""Starts the process that feeds the trackers, forwards its messages to the log, and waits for its end.

Trackers run in a process and not in a thread: whatever a client imports, prints, repeats or waits for costs the steps
no time, and the process can be ended. It ends with the controller, when its standard input is closed.
"""

import contextlib
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from controller.tracking.trackers.protocol import Run
from splitppo.config import Config, ConfigError
from splitppo.config.sections.tracking import TrackingConfig
from splitppo.config.shown import shown_tree
from splitppo.config_error import config_errors
from splitppo.machine.children.ending import end, exit_code_within
from splitppo.machine.children.tree import kill_tree
from splitppo.our_commands import our_command
from splitppo.plain_file import open_plain
from splitppo.run_folder.logs import LOGS, TRACKERS_LOG

log = logging.getLogger(__name__)

_EXIT_GRACE_S = 5.0  # added to the flush timeout, after which the process should end by itself
_SILENT_S = 3.0  # after this time, a line tells the user why the run has not ended yet
_CHECK_TIMEOUT_S = 120.0
_FIRST_PAUSE_S = 1.0
_MAX_PAUSE_S = 60.0
_ROOT = str(Path(__file__).resolve().parents[3])
_MODULE = "controller.tracking.trackers"


class TrackerProcess:
    """The process that feeds a run's trackers while the controller runs; does nothing without trackers."""

    def __init__(self, config: Config, run_dir: Path, run_id: str) -> None:
        self._config = config.tracking
        self._run = run_of(config, run_dir, run_id)
        self._running: tuple[subprocess.Popen[str], threading.Thread] | None = None
        self._pause_s = _FIRST_PAUSE_S
        self._next_start_s = 0.0

    def wake(self) -> None:
        """Starts the tracker process if it does not run. The pause before each further start is longer."""
        status = self._running[0].poll() if self._running else None
        is_running = self._running is not None and status is None
        if not self._config.trackers or is_running or time.monotonic() < self._next_start_s:
            return
        if self._running is not None:
            log.warning("the tracker process has ended, status %d: it is started again", status)
            self._pause_s = min(2 * self._pause_s, _MAX_PAUSE_S)
        self._next_start_s = time.monotonic() + self._pause_s
        try:
            process = start(self._config, self._run)
        except OSError as error:
            log.warning("the tracker process cannot be started: %s", error)
            return
        self._running = process, threading.Thread(target=_listen, args=(process.stdout,), daemon=True)
        self._running[1].start()

    def finish(self) -> None:
        """Waits until all steps are sent, for at most `tracking.flush_timeout_s`; then the tracker process ends."""
        if self._running is None:
            return
        if self._end(*self._running) not in (0, 1):  # the process was lost; another one sends the rest
            self._next_start_s = 0.0
            self.wake()
            self._end(*self._running)
        self._running = None

    def _end(self, process: subprocess.Popen[str], listener: threading.Thread) -> int:
        """Closes the tracker process's input and waits for its end; returns its exit status, 1 if it was killed."""
        assert process.stdin is not None
        with contextlib.suppress(OSError):
            process.stdin.close()
        status = _end(process, self._config.flush_timeout_s + _EXIT_GRACE_S)
        listener.join(_EXIT_GRACE_S)
        return status


def run_of(config: Config, run_dir: Path, run_id: str) -> Run:
    """Makes the description of a run that its trackers show, as a `Run`, without the secrets of its configuration."""
    sync = our_command("controller", "sync", run_dir.absolute())
    return Run(run_id, config.run.name, config.tracking.project, run_dir.absolute(), shown_tree(config), sync)


def start(config: TrackingConfig, run: Run, *, output: int | None = subprocess.PIPE) -> subprocess.Popen[str]:
    """Starts the tracker process in a session of its own, which Ctrl-C does not reach, and gives it the run.

    The run is in a file in memory and not in a pipe: nothing waits until the process reads it.
    """
    file = run.folder / LOGS / TRACKERS_LOG
    file.parent.mkdir(exist_ok=True)
    with open_plain(file, "ab") as errors, os.fdopen(os.memfd_create("run"), "w") as described:
        described.write(run.line())
        described.flush()
        descriptor = described.fileno()
        return subprocess.Popen(
            _command(config, "feed", [str(descriptor), str(config.flush_timeout_s), *config.trackers]),
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=errors,
            text=True,
            pass_fds=(descriptor,),
            start_new_session=True,
        )


def check_trackers(config: TrackingConfig) -> None:
    """Checks that no tracker lacks its package, login or address; ConfigError if one does. Asks no server."""
    # The package of TensorBoard comes with the controller.
    names = [name for name in config.trackers if name != "tensorboard" or config.python]
    if not names:
        return
    command = _command(config, "check", names)
    with config_errors(OSError, before="tracking.python: cannot be started: "):
        done = subprocess.run(command, capture_output=True, text=True, timeout=_CHECK_TIMEOUT_S, check=False)
    if done.returncode == 2:
        raise ConfigError("tracking.trackers: " + done.stdout.replace("\n", "; "))
    if done.returncode != 0:
        last_words = (done.stderr.strip().splitlines() or ["it says nothing"])[-1]
        raise ConfigError(f"tracking.trackers: {', '.join(names)} cannot be checked: {last_words}")


def _command(config: TrackingConfig, command: str, arguments: Sequence[str]) -> list[str]:
    """Returns the process's command line. If another Python runs it, our modules come last on its path."""
    find_ours = f"sys.path.append({_ROOT!r})" if config.python else f"sys.path.insert(0, {_ROOT!r})"
    start = f"import runpy, sys; {find_ours}; runpy.run_module({_MODULE!r}, run_name='__main__')"
    return [str(config.python or sys.executable), "-c", start, command, *arguments]


def _end(process: subprocess.Popen[str], timeout_s: float) -> int:
    """Waits for the end of a process, and kills it after `timeout_s`; returns its exit status, 1 if it was killed."""
    status = exit_code_within(process, min(_SILENT_S, timeout_s))
    if status is None:
        log.info("waiting for trackers, at most %g s (tracking.flush_timeout_s); Ctrl-C leaves at once", timeout_s)
        status = end(process, max(timeout_s - _SILENT_S, 0.0), kill=kill_tree)
    if status is None:
        log.warning("the tracker process did not end, and was killed")
        return 1
    return status


def _listen(lines: IO[str]) -> None:
    """Writes the messages of the tracker process into the controller's log."""
    for line in lines:
        level, _, text = line.rstrip("\n").partition(" ")
        log.log(logging.getLevelNamesMapping().get(level, logging.INFO), "%s", text)
