"""A program that runs for one conversation: a process, what it is given and prints, and the end of all it has started.

What it prints goes on to the error output of this process, which is the log of the environments, up to 1 MiB.
"""

import asyncio
import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

from environments.programs.errors import reason_in
from splitppo.machine.children.ending import exit_code_of
from splitppo.machine.children.supervisor import supervised
from splitppo.machine.children.tree import find_processes, kill_tree, kill_trees

MAX_OUTPUT_BYTES = 64 << 20
_LOGGED_BYTES = 1 << 20
_KEPT_BYTES = 1 << 16
_CHUNK_BYTES = 1 << 16
_POLL_INTERVAL_S = 0.01
_MARKED_INTERVAL_S = 0.1
_END_LIMIT_S = 5.0  # in which a supervisor kills what it has started
_LAST_OUTPUT_S = 1.0  # in which output is read that was printed before the end


class TooMuchOutput(Exception):
    """Raised if a program has printed more than it may."""


class _Output:
    """The last part of what a program prints to one of its streams."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self.last = b""

    def add(self, chunk: bytes) -> None:
        """Keeps a chunk; passes it on to the log if that has room for it."""
        self.num_bytes += len(chunk)
        self.last = (self.last + chunk)[-_KEPT_BYTES:]
        if self.num_bytes <= _LOGGED_BYTES:
            with suppress(OSError):  # a full disk
                os.write(2, chunk)

    def lines(self) -> list[str]:
        """Returns the last lines that are not empty."""
        return [line for line in self.last.decode(errors="replace").splitlines() if line.strip()]


class Program:
    """A process of a command, with all that it has started; made by `start`, and ended by `end` in any case."""

    def __init__(self, process: asyncio.subprocess.Process, marker: bytes) -> None:
        self._process = process
        self._marker = marker
        self._output = _Output()
        self._errors = _Output()
        self._readers = [
            asyncio.create_task(self._read(process.stdout, self._output)),
            asyncio.create_task(self._read(process.stderr, self._errors)),
        ]

    @classmethod
    async def start(cls, command: Sequence[str], variables: Mapping[str, str], given: bytes, marker: str) -> Self:
        """Starts a command with these environment variables, and gives it something on its standard input.

        `marker` is a text in the value of a variable that no other program has.
        """
        process = await asyncio.create_subprocess_exec(
            *supervised(tuple(command), os.getpid()),
            env=dict(variables),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        assert process.stdin is not None
        process.stdin.write(given)
        process.stdin.close()
        return cls(process, marker.encode())

    async def exit_code(self) -> int:
        """Waits until the program has ended, and its output was read; returns its exit code, negative for a signal.

        Raises:
            TooMuchOutput: it has printed more than 64 MiB.
        """
        ended = asyncio.create_task(self._ended())
        done, _ = await asyncio.wait([ended, *self._readers], return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()
        return exit_code_of(ended.result())

    @property
    def last_printed(self) -> str:
        """The last line of its standard output that is not empty; empty if there is none."""
        return next(reversed(self._output.lines()), "")

    @property
    def reason(self) -> str:
        """The reason in its error output, or else in its standard output, as one line of text; see `reason_in`."""
        return reason_in(self._errors.lines() or self._output.lines() or ["it printed nothing"])

    async def end(self) -> None:
        """Kills the program, if it runs, and all that it has started."""
        if self._process.returncode is None:
            self._process.send_signal(signal.SIGTERM)
            with suppress(TimeoutError):
                async with asyncio.timeout(_END_LIMIT_S):
                    await self._ended()
        if self._process.returncode is None:  # the supervisor is stopped
            kill_tree(self._process.pid)
        await self._ended()
        await asyncio.wait(self._readers, timeout=_LAST_OUTPUT_S)
        for reader in self._readers:
            reader.cancel()

    async def _ended(self) -> int:
        """Waits for the end of the supervisor, and returns its exit code; nothing of the program runs then."""
        while (code := self._process.returncode) is None:  # noqa: ASYNC110 - asyncio waits for others with its pipes, too
            await asyncio.sleep(_POLL_INTERVAL_S)
        if code < 0:  # it was killed; the other one kills what they have adopted, if it can
            with suppress(TimeoutError):
                async with asyncio.timeout(_END_LIMIT_S):
                    while _marked(self._marker):  # noqa: ASYNC110 - of processes that are no children nobody tells
                        await asyncio.sleep(_MARKED_INTERVAL_S)
            kill_trees(find_processes(_marked(self._marker)))
        return code

    async def _read(self, stream: asyncio.StreamReader | None, output: _Output) -> None:
        assert stream is not None
        while chunk := await stream.read(_CHUNK_BYTES):
            output.add(chunk)
            if output.num_bytes > MAX_OUTPUT_BYTES:
                raise TooMuchOutput(f"it printed more than {MAX_OUTPUT_BYTES >> 20} MiB")


def _marked(marker: bytes) -> list[int]:
    """Returns the pids of processes that have a text in their environment variables, as a program hands them on."""
    found = []
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if marker in environment.read_bytes():
                found.append(int(environment.parent.name))
    return found
