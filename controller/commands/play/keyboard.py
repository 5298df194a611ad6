"""Reads what the user types, line by line, while the rest of the program goes on."""

import asyncio
import os
import sys
import threading


class NothingToRead(Exception):
    """Raised if the standard input has ended, and a line is needed."""


class Keyboard:
    """The lines of the standard input, which a thread reads that no end of the program waits for.

    Attributes:
        is_terminal: True if somebody types; False for a pipe or a file.
    """

    def __init__(self, descriptor: int = 0) -> None:
        self._descriptor = descriptor
        self._lines: asyncio.Queue[str | None] | None = None
        self.is_terminal = os.isatty(descriptor)

    async def line(self, asked: str) -> str:
        """Returns the next line, without its end; on a terminal `asked` stands before it.

        Raises:
            NothingToRead: there is no further line.
        """
        if self._lines is None:
            self._lines = asyncio.Queue()
            threading.Thread(target=self._read, args=(asyncio.get_running_loop(), self._lines), daemon=True).start()
        if self.is_terminal:
            sys.stdout.write(asked)
        sys.stdout.flush()
        line = await self._lines.get()
        if line is None:
            self._lines.put_nowait(None)  # for whoever asks again
            raise NothingToRead("the input ended before the conversation was over")
        return line

    def _read(self, loop: asyncio.AbstractEventLoop, lines: "asyncio.Queue[str | None]") -> None:
        """Puts each line into the queue, and None at the end; the event loop may have ended meanwhile."""
        rest = b""
        try:
            while block := os.read(self._descriptor, 65536):
                *whole, rest = (rest + block).split(b"\n")
                for line in whole:
                    loop.call_soon_threadsafe(lines.put_nowait, line.decode(errors="replace").rstrip("\r"))
            if rest:
                loop.call_soon_threadsafe(lines.put_nowait, rest.decode(errors="replace"))
        except OSError:  # the terminal is gone
            pass
        except RuntimeError:  # nobody reads any more
            return
        loop.call_soon_threadsafe(lines.put_nowait, None)
