"""A process that scores, as the controller sees it: it answers within a limit, else it is killed."""

import asyncio
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from rewards.channel import LENGTH_BYTES, framed

_END_LIMIT_S = 5.0  # until a process that was killed is gone
_EXIT_LIMIT_S = 1.0  # until a process that has closed its socket is gone


class ProcessEnded(Exception):
    """A process ended before it answered; the message goes on behind "it"."""


class WorkerProcess:
    """A place for a process, which is started when it is needed and killed when it does not answer.

    Each has a socket of its own: whatever happens to a process, stopped in the middle of a message included, concerns
    no other. All methods belong to the thread of the event loop: a process may end with the thread that started it.

    Args:
        serve: the function that it runs, see `channel.work`; the first thing that this sends is a report.
        arguments: of that function.
        shared_fds: descriptors that the process has, too, by the same numbers.
        decode: reads what it sends.
        start_limit_s: seconds until its report.

    Attributes:
        is_loaded: True from its report to its end.
    """

    def __init__(
        self,
        serve: str,
        *arguments: object,
        shared_fds: Sequence[int] = (),
        decode: Callable[[bytes], Any],
        start_limit_s: float,
    ) -> None:
        self.is_loaded = False
        self._serve = serve
        self._arguments = arguments
        self._shared_fds = shared_fds
        self._decode = decode
        self._start_limit_s = start_limit_s
        self._process: subprocess.Popen[bytes] | None = None
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def start(self) -> None:
        """Starts the process, which begins to load what it needs."""
        ours, theirs = socket.socketpair()
        with theirs:
            call = f"from rewards.channel import work; work({self._serve!r}, {theirs.fileno()}, {os.getpid()})"
            self._process = subprocess.Popen(  # noqa: ASYNC220 - a thread that started it could end, and it with it
                # It imports from where this process does.
                [sys.executable, "-P", "-c", f"import sys; sys.path[:] = {sys.path!r}; {call}"],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), *self._shared_fds),
                # A session of its own: Ctrl-C and signals to the controller's process group let it finish the step.
                start_new_session=True,
            )
        self._streams = await asyncio.open_unix_connection(sock=ours)
        self._streams[1].write(framed(pickle.dumps(self._arguments)))

    async def load(self) -> Any:
        """Waits for the report of the process. TimeoutError or ProcessEnded if there is none."""
        if self._process is None:
            await self.start()
        report = await self._answer(self._start_limit_s)
        self.is_loaded = True
        return report

    async def ask(self, request: object, limit_s: float) -> Any:
        """Returns the answer of a loaded process. TimeoutError or ProcessEnded: the process is gone."""
        return await self._answer(limit_s, await asyncio.to_thread(pickle.dumps, request))

    async def end(self, limit_s: float = 0.0) -> int | None:
        """Closes the socket, then kills the process, stopped or not, unless that has ended it within the limit.

        What a user's function has started in its session is killed, too. Returns the exit code of a process that has
        ended by itself, else None.
        """
        process, self._process = self._process, None
        if self._streams is not None:
            self._streams[1].transport.abort()
        self._streams = None
        self.is_loaded = False
        if process is None:
            return None
        try:
            has_ended = await asyncio.to_thread(_ends_within, process.pid, limit_s)
        finally:
            for kill in (os.killpg, os.kill):
                with suppress(ProcessLookupError):
                    kill(process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(process.wait, _END_LIMIT_S)
        return process.returncode if has_ended else None

    async def _answer(self, limit_s: float, request: bytes | None = None) -> Any:
        """Returns what the process says next, after `request` if there is one; a failure costs the process."""
        try:
            async with asyncio.timeout(limit_s):
                if self._streams is None:  # it was ended meanwhile
                    raise EOFError
                reader, writer = self._streams
                if request is not None:
                    writer.write(framed(request))
                    await writer.drain()
                length = int.from_bytes(await reader.readexactly(LENGTH_BYTES))
                return self._decode(await reader.readexactly(length))
        except (EOFError, ConnectionError) as error:
            raise ProcessEnded(_how_it_ended(await self.end(_EXIT_LIMIT_S))) from error
        except BaseException:
            await self.end()
            raise


def _ends_within(pid: int, limit_s: float) -> bool:
    """Waits for the end of a child, which stays to be waited for: nobody else gets its pid meanwhile."""
    descriptor, poller = os.pidfd_open(pid), select.poll()
    try:
        poller.register(descriptor, select.POLLIN)
        return bool(poller.poll(limit_s * 1000))
    finally:
        os.close(descriptor)


def _how_it_ended(exit_code: int | None) -> str:
    if exit_code is None:
        return "does not answer any more"
    if exit_code >= 0:
        return f"ended its process with code {exit_code}"
    name = signal.Signals(-exit_code).name
    perhaps = ", perhaps for want of memory" if name == "SIGKILL" else ""
    return f"was killed by signal {-exit_code} ({name}{perhaps})"
