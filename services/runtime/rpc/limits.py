"""Limits of a server: how many calls at a time, how large a request. Beyond them, RESOURCE_EXHAUSTED."""

from collections.abc import Iterator
from contextlib import contextmanager

from splitppo.rpc.errors import LimitExceeded

# Requests but for batches hold ids, numbers and the names of columns.
MAX_REQUEST_BYTES = 64 << 10


class CallLimit:
    """Counts the calls that are being answered. For one event loop."""

    def __init__(self, max_calls: int) -> None:
        self._max_calls = max_calls
        self._num_calls = 0

    @contextmanager
    def one(self) -> Iterator[None]:
        """One call, as long as it lasts; LimitExceeded if there is no room for it."""
        if self._num_calls >= self._max_calls:
            raise LimitExceeded(f"the service answers {self._max_calls} calls at a time (services.max_calls)")
        self._num_calls += 1
        try:
            yield
        finally:
            self._num_calls -= 1
