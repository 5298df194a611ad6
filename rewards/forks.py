"""Forks child processes of the controller from one that has imported their code: in milliseconds, not in a second.

    controller                             template                    child
    Template.fork  -- descriptors ------>  os.fork()  ------------->   work(...)
                   <-- pid --------------
    Forked.wait    -- pid -------------->  os.waitpid(pid)
                   <-- exit code --------

The template has one thread and runs no code of a user's, so a fork of it is sound: no lock is held by a thread that the
child lacks, and no connection or random state of the user's is shared. What the user wrote is loaded behind the fork.
"""

import asyncio
import gc
import os
import pkgutil
import select
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass

from rewards.channel import work
from splitppo.machine.children.parent import end_with

_FORK = b"fork"
_MAX_MESSAGE_BYTES = 64
_MAX_STARTS = 3  # templates in a row that ended before they forked
_ANSWER_LIMIT_S = 120.0  # of a template; the first answer comes when it has imported the code


class Template:
    """A process from which others are forked; started with the first one, and again if it has been killed.

    Args:
        serve: "module:function", what the children run, see `channel.work`; the template imports it.
    """

    def __init__(self, serve: str) -> None:
        self._serve = serve
        self._life: _Life | None = None

    async def fork(self, connection: int, memory: int) -> "Forked":
        """Forks a child, which gets these two descriptors.

        Must be called in the thread of the event loop: the template ends with the thread that started it.

        Raises:
            ChildProcessError: templates do not stay alive.
        """
        for _ in range(_MAX_STARTS):
            if self._life is None or self._life.has_ended:
                self._life = _Life(self._serve)
            life = self._life
            try:
                return Forked(await asyncio.to_thread(life.ask, _FORK, (connection, memory)), life)
            except (EOFError, OSError):
                life.end()
        raise ChildProcessError(f"could not be forked: {_MAX_STARTS} templates in a row have ended")

    def end(self) -> None:
        """Ends the template, and with it all children."""
        if self._life is not None:
            self._life.end()


class _Life:
    """One life of a template."""

    def __init__(self, serve: str) -> None:
        self._control, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        self._control.settimeout(_ANSWER_LIMIT_S)
        self._lock = threading.Lock()
        with theirs:
            call = f"fork_on_request({serve!r}, {theirs.fileno()}, {os.getpid()})"
            self._process = start_python(f"from rewards.forks import fork_on_request; {call}", (theirs.fileno(),))

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def ask(self, request: bytes, descriptors: tuple[int, ...] = ()) -> int:
        """Sends a request and returns the answer; EOFError or OSError: there is none."""
        with self._lock:
            socket.send_fds(self._control, [request], descriptors)
            answer = self._control.recv(_MAX_MESSAGE_BYTES)
        if not answer:
            raise EOFError
        return int(answer)

    def end(self) -> None:
        """Kills the template, also one that is stopped, and with it all its children."""
        self._process.kill()
        self._process.wait()
        with self._lock:  # whoever waits for an answer has been told by now
            self._control.close()


@dataclass(eq=False)
class Forked:
    """A child that was forked from a template, as `subprocess.Popen` has one. It stays a zombie until `wait`."""

    pid: int
    template: _Life
    returncode: int | None = None

    def wait(self, limit_s: float) -> int:
        """Waits for the end of the child, and returns its exit code, negative for a signal.

        Raises:
            subprocess.TimeoutExpired: it has not ended.
        """
        if self.returncode is None:
            if not ends_within(self.pid, limit_s):
                raise subprocess.TimeoutExpired("", limit_s)
            try:
                self.returncode = self.template.ask(str(self.pid).encode())
            except (EOFError, OSError):  # a template that was killed has taken its children with it
                self.returncode = -signal.SIGKILL
        return self.returncode


def start_python(call: str, descriptors: tuple[int, ...]) -> subprocess.Popen[bytes]:
    """Starts a process that makes a call, with the import path of this one and these descriptors."""
    return subprocess.Popen(
        [sys.executable, "-P", "-c", f"import sys; sys.path[:] = {sys.path!r}; {call}"],
        stdin=subprocess.DEVNULL,
        pass_fds=descriptors,
        # A session of its own: Ctrl-C and signals to the controller's group do not reach it in mid-step.
        start_new_session=True,
    )


def ends_within(pid: int, limit_s: float) -> bool:
    """Waits up to `limit_s` seconds for a child process to end; returns True if it has ended.

    The ended process stays a zombie, so no other process gets its pid.
    """
    try:
        descriptor = os.pidfd_open(pid)
        poller = select.poll()
    except ProcessLookupError:  # its template was killed
        return True
    try:
        poller.register(descriptor, select.POLLIN)
        return bool(poller.poll(limit_s * 1000))
    finally:
        os.close(descriptor)


def fork_on_request(serve: str, control: int, controller_pid: int) -> None:
    """Runs the template: forks children, and tells their exit codes, until the controller closes the socket."""
    end_with(controller_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    pkgutil.resolve_name(serve)
    gc.freeze()  # children share the memory of what was imported
    pid = os.getpid()
    with socket.socket(fileno=control) as requests:
        while True:
            request, descriptors, _, _ = socket.recv_fds(requests, _MAX_MESSAGE_BYTES, 2)
            if request == _FORK:
                answer = os.fork()
                if answer == 0:
                    requests.close()
                    connection, memory = descriptors
                    _run_child(serve, connection, memory, pid)
                for descriptor in descriptors:
                    os.close(descriptor)
            elif request:
                answer = os.waitstatus_to_exitcode(os.waitpid(int(request), 0)[1])
            else:
                return
            requests.send(str(answer).encode())


def _run_child(serve: str, connection: int, memory: int, template_pid: int) -> None:
    """Runs the code of a child, and ends its process."""
    exit_code = 1
    with suppress(BaseException):
        os.setsid()
        try:
            work(serve, connection, memory, template_pid)
            exit_code = 0
        except BaseException:  # noqa: BLE001 - this process ends here, whatever happened
            sys.excepthook(*sys.exc_info())
        sys.stdout.flush()
    os._exit(exit_code)
