"""The answers of a guest: lines "STATUS SIZE", each with SIZE bytes of output behind it."""

import re
from collections.abc import Iterator

from rewards.code.limits import Limit

# The program is about to run; a test's program has ended, well or not.
STARTED, OK, ERROR = "started", "ok", "error"
_HEADER = re.compile(rf"({'|'.join((STARTED, OK, ERROR, *(limit.value for limit in Limit)))}) (\d{{1,12}})\n".encode())
_MAX_HEADER_BYTES = 32


class Frames:
    """Takes apart what is received, and keeps no output that is larger than `max_bytes`."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._received = bytearray()
        self._num_skipped = 0  # bytes to come that belong to an output that was refused

    def feed(self, chunk: bytes) -> Iterator[tuple[str, bytes | None]]:
        """Yields status and output of each frame that is complete now; None for an output that is too large.

        Raises:
            ValueError: it is no frame.
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
            status, start, num_bytes = header[1].decode(), header.end(), int(header[2])
            del header  # the buffer cannot shrink as long as a match refers to it
            if num_bytes > self._max_bytes:
                output, num_bytes, self._num_skipped = None, 0, num_bytes
            elif len(self._received) < start + num_bytes:
                return
            else:
                output = bytes(self._received[start : start + num_bytes])
            del self._received[: start + num_bytes]
            yield status, output
