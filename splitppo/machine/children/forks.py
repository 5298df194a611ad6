"""A process from which others are forked: what it has imported once, all of them have from their first moment.

    owner (`ForkServer`)                          fork server (`serve_forks`)        forked process

    fork    -- request, three descriptors ---->   os.fork  ----------------------->  run(request)
    pid, poll  <========= pid, then exit code, by a pipe for this process alone ===  ends

A forked process that has ended stays a zombie until its owner has taken the exit code, as a child of the owner would.

The server has one thread and opens nothing, so a fork of it is sound: no lock is held by a thread that the forked
process lacks. The standard library is enough for both sides.
"""

import fcntl
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import IO, Any, NoReturn

from splitppo.machine.children.ending import exit_code_within, keep_exit_codes

_MAX_MESSAGE_BYTES = 1 << 17
# How long a server may take to tell the exit code of a process that has ended; one that is stopped never does.
_CODE_LIMIT_S = 1.0
_PAUSE_S = 0.01
_POLL_INTERVAL_S = 0.1
_MAX_DESCRIPTORS = 8  # standard input, standard output and error, where the exit status is written, and others


UNKNOWN = 255  # the exit code of a process of which nobody knows how it has ended


class ForkServer:
    """The owner's side: starts a fork server, and asks it for processes.

    Make it in a thread that lives as long as the server should: the server ends with the thread that started it.

    Args:
        command: starts a process that calls `serve_forks`. It gets two more arguments: the descriptor of its socket,
            and the pid of the owner.
        environment: of the server, and of what is forked from it.
        output: takes what the server prints.
        lost_code: the exit code of processes whose server has ended before it could say theirs.

    Attributes:
        has_forked: True once a process of it has been seen; the next one then comes at once.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        output: IO[bytes] | int,
        *,
        lost_code: int = UNKNOWN,
    ) -> None:
        """Starts the server.

        While this process lives it holds `_lifeline` open, the other end of the server's standard input: when that end
        closes, a server that is stopped goes on and ends, see `_wake_at_end_of`.
        """
        self.has_forked = False
        self.lost_code = lost_code
        self._control, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        self._control.setblocking(False)
        self._lifeline: int | None
        stdin, self._lifeline = os.pipe()
        with theirs:
            self._process = subprocess.Popen(
                [*command, str(theirs.fileno()), str(os.getpid())],
                env=environment,
                stdin=stdin,
                stdout=output,
                stderr=output,
                pass_fds=(theirs.fileno(),),
                # A session of its own: Ctrl-C reaches the owner alone.
                start_new_session=True,
            )
        _wake_at_end_of(stdin, self._process.pid)
        os.close(stdin)

    @property
    def pid(self) -> int:
        """The pid of the fork server."""
        return self._process.pid

    def poll(self) -> int | None:
        """Returns the exit code of the server, negative for a signal; None while it runs."""
        return self._process.poll()

    def fork(self, request: object, stdin: int, output: int, more: Sequence[int] = ()) -> "Forked":
        """Asks for a process with these descriptors as standard streams, and `more`; `request` goes to it by JSON.

        Does not wait: the process starts when the server has imported everything, and never if the server ends before.
        """
        status, theirs = os.pipe()
        # Suppressed: the server has ended, or so many requests wait that it must hang. The end of the pipe then says
        # that no process comes.
        with suppress(BrokenPipeError, ConnectionResetError, BlockingIOError):
            socket.send_fds(self._control, [json.dumps(request).encode()], (theirs, stdin, output, *more))
        os.close(theirs)
        return Forked(status, self)

    def end(self) -> int:
        """Kills the server, also one that is stopped, unless it has ended; what was forked from it lives on.

        Returns:
            Its exit code, negative for a signal.
        """
        self._control.close()
        self._process.kill()
        exit_code = self._process.wait()
        if self._lifeline is not None:
            os.close(self._lifeline)
            self._lifeline = None
        return exit_code

    def join(self, timeout_s: float) -> int | None:
        """Waits until the server has ended, up to `timeout_s` seconds; returns its exit code, None if it runs on."""
        return exit_code_within(self._process, timeout_s)


class Forked:
    """A process that was asked for, as `subprocess.Popen` has one.

    Attributes:
        pid: 0 until it has been forked.
        returncode: as of the last `poll`: None while the process runs or is not there yet; its exit code, negative for
            a signal; the server's `lost_code` if that has ended before it, or is stopped.
        refusal: why the machine gave no process; empty without a reason.
    """

    def __init__(self, status: int, server: ForkServer) -> None:
        self.pid = 0
        self.returncode: int | None = None
        self.refusal = ""
        self._server = server
        self._status: int | None = status
        self._said = b""
        self._process: int | None = None
        self._over_since_s: float | None = None  # when its end was seen

    def has_begun_within(self, limit_s: float) -> bool:
        """Waits up to `limit_s` seconds for the process; returns False if it has not been forked, and may never be."""
        deadline_s = time.monotonic() + limit_s
        while not self.pid and self.poll() is None and time.monotonic() < deadline_s:
            self._listen(_POLL_INTERVAL_S)
        return self.pid > 0

    def poll(self) -> int | None:
        """Returns the exit code, None while the process runs or is not there yet."""
        # The end of its pipe says so, too, unless a process that the server has started holds the server's socket.
        never_comes = not self.pid and self._server.poll() is not None
        self._listen(0)
        if never_comes and not self.pid and self.returncode is None:
            self._has_ended(self._server.lost_code)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the end of the process and returns its exit code; subprocess.TimeoutExpired after `timeout` s."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            left = _POLL_INTERVAL_S if deadline is None else deadline - time.monotonic()
            if left < 0:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)
            self._listen(min(left, _POLL_INTERVAL_S))
        return code

    def _listen(self, timeout_s: float | None) -> None:
        """Waits until the server says something, or the process has ended."""
        sources = [source for source in (self._status, self._process) if source is not None]
        if self.returncode is not None or not (ready := _readable(sources, timeout_s)):
            return
        if self._status is not None and self._status in ready:
            self._hear(self._status)
            return
        # The process has ended. Its server is about to say how, unless it has gone, or is stopped.
        if self._over_since_s is None:
            self._over_since_s = time.monotonic()
        if self._status is None or time.monotonic() - self._over_since_s > _CODE_LIMIT_S:
            self._has_ended(self._server.lost_code)
        elif timeout_s != 0:
            time.sleep(_PAUSE_S)

    def _hear(self, status: int) -> None:
        """Takes what the server says: the pid, then the exit code; or why there is no process; at its end nothing.

        It says one line of JSON at a time, of which a part may have come: a number is the pid or the exit code, a text
        says why it could not fork.
        """
        part = os.read(status, 4096)
        self._said += part
        sentences = [json.loads(line) for line in self._said.splitlines(keepends=True) if line.endswith(b"\n")]
        if sentences and isinstance(sentences[0], str):
            self.refusal = sentences[0]
            self._has_ended(self._server.lost_code)
        elif sentences and not self.pid:
            self.pid = sentences[0]
            self._server.has_forked = True
            with suppress(ProcessLookupError):  # it has ended already, as the next sentence says
                self._process = os.pidfd_open(self.pid)
        if len(sentences) > 1:
            self._has_ended(sentences[1])
        elif not part:
            os.close(status)
            self._status = None
            if self._process is None:
                self._has_ended(self._server.lost_code)

    def _has_ended(self, code: int) -> None:
        """Notes the exit code, and closes what told about the process."""
        self.returncode = code
        for descriptor in (self._status, self._process):
            if descriptor is not None:
                os.close(descriptor)
        self._status = None
        self._process = None

    def send_signal(self, number: int) -> None:
        """Sends a signal to the process, if it runs."""
        if self.poll() is None and self._process is not None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._process, number)

    def kill(self) -> None:
        """Sends SIGKILL to the process, if it runs."""
        self.send_signal(signal.SIGKILL)


def _readable(descriptors: Sequence[int], timeout_s: float | None) -> set[int]:
    """Waits up to timeout_s seconds (None: for ever) and returns the descriptors that can be read, or have ended."""
    poller = select.poll()
    for descriptor in descriptors:
        poller.register(descriptor, select.POLLIN)
    return {descriptor for descriptor, _ in poller.poll(None if timeout_s is None else 1000 * timeout_s)}


def serve_forks(control: int, run: Callable[..., int]) -> None:
    """Forks a process for each request, until the owner has gone; the process ends with the code that `run` returns.

    `run` gets the request and the descriptors that came with it, without those of the standard streams.

    Call it on the main thread of a process with one thread. `control` is the descriptor of the owner's socket. A forked
    process that is stopped goes on when its standard input ends, so that it can end, too.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    keep_exit_codes()
    gc.freeze()  # forked processes share the memory of what was imported
    with socket.socket(fileno=control) as requests:
        _Server(requests, run).serve()


class _Server:
    """The server's side: forks processes, and tells its owner at the other end of `requests` how they end."""

    def __init__(self, requests: socket.socket, run: Callable[..., int]) -> None:
        self._requests = requests
        self._run = run
        self._running: dict[int, tuple[int, int]] = {}  # by descriptor of a process: pid, where its end is told
        self._ended: dict[int, int] = {}  # by descriptor where the end was told: pid of a zombie
        self._poller = select.poll()
        self._poller.register(requests, select.POLLIN)

    def serve(self) -> None:
        """Forks and tells how processes end, until the owner has gone."""
        while True:
            for ready, _ in self._poller.poll():
                if ready in self._running:
                    self._tell_end(ready)
                elif ready in self._ended:
                    self._forget(ready)
                elif not self._fork():
                    return

    def _fork(self) -> bool:
        """Forks a process for the next request; returns False if the owner has gone.

        With a request come descriptors: first the one on which its process's pid and end are told, then standard input
        and output, then those that `run` gets.
        """
        request, descriptors, _, _ = socket.recv_fds(self._requests, _MAX_MESSAGE_BYTES, _MAX_DESCRIPTORS)
        if not request:
            return False
        status, *given = descriptors
        try:
            pid = os.fork()
        except OSError as error:
            _say(status, str(error))
            os.close(status)
        else:
            if pid == 0:
                self._close_all()
                os.close(status)
                end_after(partial(_run_forked, self._run, json.loads(request), *given))
            _wake_at_end_of(given[0], pid)
            _say(status, pid)
            process = os.pidfd_open(pid)
            self._running[process] = pid, status
            self._poller.register(process, select.POLLIN)
        for descriptor in given:
            os.close(descriptor)
        return True

    def _close_all(self) -> None:
        """Closes, in a forked process, what the server has open of its owner and of other processes."""
        self._requests.close()
        for process, (_, status) in self._running.items():
            os.close(process)
            os.close(status)
        for status in self._ended:
            os.close(status)

    def _tell_end(self, process: int) -> None:
        """Tells the exit code of a process, which stays a zombie until its owner has taken it."""
        pid, status = self._running.pop(process)
        self._poller.unregister(process)
        os.close(process)
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        assert ended is not None, "it has ended"
        _say(status, ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status)
        self._ended[status] = pid
        self._poller.register(status, 0)  # the end of its reader is always reported

    def _forget(self, status: int) -> None:
        """Ends a zombie: its owner has taken the exit code, or has gone, and no longer reads."""
        os.waitpid(self._ended.pop(status), 0)
        self._poller.unregister(status)
        os.close(status)


def _wake_at_end_of(stdin: int, pid: int) -> None:
    """Makes the kernel send SIGCONT to a process when nobody can write to its standard input any more (`man 2 fcntl`).

    A process that is stopped, also before its first instruction, goes on then, and sees for itself that it should end.
    """
    fcntl.fcntl(stdin, fcntl.F_SETOWN, pid)
    fcntl.fcntl(stdin, fcntl.F_SETSIG, signal.SIGCONT)
    fcntl.fcntl(stdin, fcntl.F_SETFL, fcntl.fcntl(stdin, fcntl.F_GETFL) | os.O_ASYNC)


def _say(status: int, what: int | str) -> None:
    with suppress(BrokenPipeError):  # nobody listens any more
        os.write(status, f"{json.dumps(what)}\n".encode())


def _run_forked(run: Callable[..., int], request: Any, stdin: int, output: int, *more: int) -> int:
    """Runs a request in a new session with its own standard streams, and returns the exit code."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for descriptor, stream in ((stdin, 0), (output, 1), (output, 2)):
        os.dup2(descriptor, stream)
    for descriptor in (stdin, output):
        os.close(descriptor)
    return run(request, *more)


def end_after(run: Callable[[], int]) -> NoReturn:
    """Runs the rest of a forked process, and ends it with the exit code that comes back; 1 after an exception.

    Nothing that its parent would do at an exit is done.
    """
    exit_code = 1
    try:
        exit_code = run()
    except SystemExit as left:
        exit_code = _exit_code_of(left)
    except BaseException:  # noqa: BLE001 - this process ends here, whatever happened
        sys.excepthook(*sys.exc_info())
    finally:
        with suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(exit_code)


def _exit_code_of(left: SystemExit) -> int:
    """Returns the exit code of a program that has left by `sys.exit`, and prints what it said, as Python does."""
    if left.code is None or isinstance(left.code, int):
        return left.code or 0
    sys.stderr.write(f"{left.code}\n")
    return 1
