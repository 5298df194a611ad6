"""Parses what guest.py writes: each answer is a line "STATUS SIZE", then SIZE bytes of a program's output."""

import re
from collections.abc import Iterator

from rewards.code.limits import Limit

# started: the program is about to run. ok, error: a test's process has ended without or with an error.
STARTED = "started"
OK = "ok"
ERROR = "error"
_HEADER = re.compile(rf"({'|'.join((STARTED, OK, ERROR, *(limit.value for limit in Limit)))}) (\d{{1,12}})\n".encode())
_MAX_HEADER_BYTES = 32


class Frames:
    """Parses the byte stream of guest.py into answers; never stores an output that is larger than `max_bytes`."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._received = bytearray()
        self._num_skipped = 0  # bytes still to come of an output that is too large

    def feed(self, chunk: bytes) -> Iterator[tuple[str, bytes | None]]:
        """Adds received bytes to those before, and yields (status, output) of each answer that is complete with them.

        Raises:
            ValueError: the received bytes are no answer of guest.py.
        """
        self._received += chunk
        while True:
            num_gone = min(self._num_skipped, len(self._received))
            del self._received[:num_gone]
            self._num_skipped -= num_gone
            header = _HEADER.match(self._received)
            if header is None:
                if b"\n" in self._received or len(self._received) > _MAX_HEADER_BYTES:
                    raise ValueError(f'expected "STATUS SIZE", got {bytes(self._received[:_MAX_HEADER_BYTES])!r}')
                return
            status = header[1].decode()
            start = header.end()
            num_bytes = int(header[2])
            del header  # the buffer cannot shrink as long as a match refers to it
            output: bytes | None = None
            if num_bytes > self._max_bytes:
                self._num_skipped = num_bytes
                num_bytes = 0
            elif len(self._received) < start + num_bytes:
                return
            else:
                output = bytes(self._received[start : start + num_bytes])
            del self._received[: start + num_bytes]
            yield status, output
