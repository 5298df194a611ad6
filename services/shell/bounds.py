"""Bounds of a server: how many calls at a time, how many bytes of batches in all. Over one, RESOURCE_EXHAUSTED."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from splitppo.rpc.errors import LimitExceeded

# Requests but for batches hold ids, numbers and the names of columns.
MAX_REQUEST_BYTES = 64 << 10


class CallLimit:
    """Counts the calls that are being answered. For one event loop.

    Args:
        max_calls: services.max_calls.
    """

    def __init__(self, max_calls: int) -> None:
        self._max_calls = max_calls
        self._num_calls = 0

    @contextmanager
    def one(self) -> Iterator[None]:
        """One call, as long as it lasts.

        Raises:
            LimitExceeded: there is no room for it.
        """
        if self._num_calls >= self._max_calls:
            raise LimitExceeded(f"the service answers {self._max_calls} calls at a time (services.max_calls)")
        self._num_calls += 1
        try:
            yield
        finally:
            self._num_calls -= 1


class ByteLimit:
    """Bytes of batches that are held, and of those on their way. Thread-safe.

    Args:
        max_bytes: services.max_held_bytes.
        held_bytes: what is held now.
    """

    def __init__(self, max_bytes: int, held_bytes: Callable[[], int]) -> None:
        self._max_bytes = max_bytes
        self._held_bytes = held_bytes
        self._coming_bytes = 0
        self._lock = threading.Lock()

    def reserve(self, num_bytes: int) -> None:
        """Makes room for a batch, until `release`.

        Raises:
            LimitExceeded: there is none.
        """
        with self._lock:
            taken = self._held_bytes() + self._coming_bytes
            if taken + num_bytes > self._max_bytes:
                raise LimitExceeded(
                    f"no room for a batch of {num_bytes} bytes: {taken} of {self._max_bytes} bytes are taken"
                    " (services.max_held_bytes)"
                )
            self._coming_bytes += num_bytes

    def release(self, num_bytes: int) -> None:
        """The batch is held now, or was given up."""
        with self._lock:
            self._coming_bytes -= num_bytes
