"""What the main thread of a rank is doing, and since when it has made no progress."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from splitppo.rpc.errors import Place


@dataclass(frozen=True)
class Doing:
    """A moment of the main thread.

    Attributes:
        place: method, step and phase; empty when it waits for the next order.
        progress: how far it is, e.g. "3 of 8"; empty before the first progress.
        limit_s: longest silence that is allowed there.
        silent_s: since the last progress; 0 when it waits for the next order.
    """

    place: Place = field(default_factory=Place)
    progress: str = ""
    limit_s: float = 0.0
    silent_s: float = 0.0


class Activity:
    """Written by the main thread, read by the watchdog. Thread-safe.

    Args:
        start_limit_s: until the rank is ready.
        limit_s: between two signs of progress of a command.
        clock: seconds that never go back.
    """

    def __init__(
        self,
        start_limit_s: float = float("inf"),
        limit_s: float = float("inf"),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limit_s = limit_s
        self._clock = clock
        self._lock = threading.Lock()
        self._doing: Doing | None = Doing(Place(phase="start"), limit_s=start_limit_s)
        self._since = clock()

    def idle(self) -> None:
        """The rank waits for its next order."""
        self._set(None)

    @contextmanager
    def command(self, place: Place) -> Iterator[None]:
        """Within the block it works on a command; an error leaves on record where it happened."""
        self._set(Doing(place, limit_s=self._limit_s))
        yield
        self.idle()

    def progress(self, done: int, total: int, phase: str) -> None:
        """The command goes on."""
        with self._lock:
            doing = self._doing or Doing(limit_s=self._limit_s)
        self._set(replace(doing, place=replace(doing.place, phase=phase), progress=f"{done} of {total}"))

    def now(self) -> Doing:
        """What it does at this moment."""
        with self._lock:
            if self._doing is None:
                return Doing()
            return replace(self._doing, silent_s=self._clock() - self._since)

    def _set(self, doing: Doing | None) -> None:
        with self._lock:
            self._doing, self._since = doing, self._clock()
