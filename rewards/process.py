"""Starts and calls child processes that score; a process that does not answer within a time limit is killed."""

import asyncio
import mmap
import os
import pickle
import signal
import socket
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rewards.channel import LENGTH_BYTES, framed
from rewards.forks import Template
from splitppo.machine.children.ending import Process, end, signal_name
from splitppo.machine.children.start import python_command

_EXIT_LIMIT_S = 1.0  # until a process that has closed its socket is gone


class ProcessEnded(Exception):
    """Raised if a scoring process ended before it answered; the message completes the sentence "it ...".

    Attributes:
        signal: the signal that ended it; None: none did.
    """

    def __init__(self, exit_code: int | None) -> None:
        super().__init__(_how_it_ended(exit_code))
        self.signal = -exit_code if exit_code is not None and exit_code < 0 else None


@dataclass(eq=False)
class WorkerProcess:
    """A child process that answers requests; it is killed if it does not answer in time, and can be started again.

    Each process has a socket of its own, so a process that is stopped in the middle of a message disturbs no other. All
    methods must be called in the thread of the event loop, because a process may end with the thread that started it.

    Args:
        serve: "module:function", the function that the process runs, see `channel.work`. Its first message is a report.
        arguments: the arguments of this function after the channel.
        decode: turns the bytes of a message into a value.
        start_limit_s: the largest number of seconds from the start to the report.
        num_shared_bytes: the size of the memory that both processes see.
        template: what the process is forked from; None: it is started anew.

    Attributes:
        shared: that memory.
        is_loaded: True from the report to the end of the process.
    """

    serve: str
    arguments: tuple[object, ...]
    decode: Callable[[bytes], Any]
    start_limit_s: float
    num_shared_bytes: int = mmap.PAGESIZE
    template: Template | None = None
    is_loaded: bool = False
    _process: Process | None = None
    _streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    def __post_init__(self) -> None:
        self._memory = os.fdopen(os.memfd_create("shared"), "r+b", buffering=0)
        self._memory.truncate(self.num_shared_bytes)
        self.shared = mmap.mmap(self._memory.fileno(), self.num_shared_bytes)

    async def start(self) -> None:
        """Starts the child process and sends its arguments; does not wait for its first message, the report."""
        memory = self._memory.fileno()
        if self.template is None:
            self._process, connection = _started(self.serve, memory)
        else:
            self._process, connection = await self.template.fork(memory)
        self._streams = await asyncio.open_unix_connection(sock=connection)
        self._streams[1].write(framed(pickle.dumps(self.arguments)))

    async def load(self) -> Any:
        """Starts the child process if it does not run, and returns its first message, the report.

        Raises TimeoutError or ProcessEnded if the report does not come.
        """
        if self._process is None:
            await self.start()
        report = await self.receive(self.start_limit_s)
        self.is_loaded = True
        return report

    async def ask(self, request: object, limit_s: float) -> Any:
        """Sends a request to the child process and returns the answer; waits at most `limit_s` seconds.

        Raises TimeoutError or ProcessEnded if no answer comes; the process has then been killed or has ended.
        """
        return await self.receive(limit_s, await asyncio.to_thread(pickle.dumps, request))

    def send(self, request: object) -> None:
        """Sends a request to the child process and waits for nothing; a process that has ended gets none."""
        if self._streams is not None:
            self._streams[1].write(framed(pickle.dumps(request)))

    async def end(self, limit_s: float = 0.0) -> int | None:
        """Closes the socket, waits `limit_s` seconds for the child process to end, then kills it and its whole session.

        Returns the exit code if the process has ended by itself, else None. A process that a signal has stopped is
        killed, too.
        """
        process = self._process
        self._process = None
        if self._streams is not None:
            self._streams[1].transport.abort()
        self._streams = None
        self.is_loaded = False
        return None if process is None else await asyncio.to_thread(end, process, limit_s)

    async def receive(self, limit_s: float, request: bytes | None = None) -> Any:
        """Sends a pickled request, if given, and returns the next message of the process; raises as `ask` does."""
        try:
            async with asyncio.timeout(limit_s):
                if self._streams is None:  # `end` was called meanwhile
                    raise EOFError
                reader, writer = self._streams
                if request is not None:
                    writer.write(framed(request))
                    await writer.drain()
                length = int.from_bytes(await reader.readexactly(LENGTH_BYTES))
                return self.decode(await reader.readexactly(length))
        except (EOFError, ConnectionError) as error:
            raise ProcessEnded(await self.end(_EXIT_LIMIT_S)) from error
        except BaseException:
            await self.end()
            raise


def _started(serve: str, memory: int) -> tuple[Process, socket.socket]:
    """Starts a process that runs `serve`, and returns it with the socket to it."""
    ours, theirs = socket.socketpair()
    with theirs:
        descriptors = theirs.fileno(), memory
        process = subprocess.Popen(
            python_command(f"from rewards.channel import work; work({serve!r}, *{descriptors}, {os.getpid()})"),
            stdin=subprocess.DEVNULL,
            pass_fds=descriptors,
            # A session of its own: Ctrl-C and signals to the controller's group do not reach it in mid-step.
            start_new_session=True,
        )
    return process, ours


def _how_it_ended(exit_code: int | None) -> str:
    """Describes, for an error message, how a process that gave no answer ended; exit code None: it still ran."""
    if exit_code is None:
        return "does not answer any more"
    if exit_code >= 0:
        return f"ended its process with code {exit_code}"
    number = -exit_code
    cause = ", perhaps for want of memory" if number == signal.SIGKILL else ""
    name = signal_name(number)
    is_nameless = name.endswith(f" {number}")  # "signal 34"
    return f"was killed by {name}" if is_nameless else f"was killed by signal {number} ({name}{cause})"
