"""Bounds the connections of the endpoint in number and time, whoever opens them."""

import asyncio
import resource
from typing import Any, ClassVar

from uvicorn.protocols.http.h11_impl import H11Protocol

from environments.gateway.bodies import HAS_KEY

_OPEN_FILES = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
MAX_CONNECTIONS = 1000 if _OPEN_FILES == resource.RLIM_INFINITY else min(1000, _OPEN_FILES // 2)
REQUEST_S = 60.0  # until a request that has begun is there, and until the first one of a connection is


class Connection(H11Protocol):
    """A connection that is closed if no whole request with a living key comes in time.

    Between two requests of a program it may be silent. If there are too many connections, the oldest is closed that
    does not wait for an answer.
    """

    _open: ClassVar[dict["Connection", None]] = {}  # the oldest first

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.app_state = {**self.app_state, HAS_KEY: self._begin_answer}
        self._is_answered = False
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begins the time of the first request, and closes another connection if there are too many."""
        super().connection_made(transport)
        self._open[self] = None
        self._begin_timer()
        if len(self._open) > MAX_CONNECTIONS:
            oldest = next((one for one in self._open if not one._is_answered), self)  # noqa: SLF001
            del self._open[oldest]
            oldest.transport.abort()

    def data_received(self, data: bytes) -> None:
        """Begins the time of a request, if none has begun."""
        if not self._is_answered and self._timer is None:
            self._begin_timer()
        super().data_received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forgets a connection that has ended."""
        self._open.pop(self, None)
        self._end_timer()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        """Waits for the next request, as long as that takes."""
        self._is_answered = False
        super().on_response_complete()

    def _begin_answer(self) -> None:
        """Ends the time of the request: its key is that of a living conversation, and it may wait for the answer."""
        self._is_answered = True
        self._end_timer()

    def _begin_timer(self) -> None:
        self._timer = self.loop.call_later(REQUEST_S, self.transport.abort)

    def _end_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
