"""Bounds the connections of those who have not the token, so that they never keep out who has it."""

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from viewer.guard import OF_OWNER

STRANGER_S = 30.0
MAX_STRANGERS = 64
BACKLOG = 16  # connections are accepted so many at a time: each is read from before newer ones could close it


class Connection(H11Protocol):
    """A connection that ends after STRANGER_S, or once MAX_STRANGERS newer ones are there, unless it shows the token.

    Half a request counts as none. The owner and another user of the machine have the same address, so it says nothing.
    Who has shown the token may listen for as long as the run takes.
    """

    _strangers: dict["Connection", asyncio.TimerHandle] = {}  # noqa: RUF012 - of all connections, the oldest first

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.app_state = {**self.app_state, OF_OWNER: self.forget}

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begins the time of a stranger, and closes the oldest one if there are too many."""
        super().connection_made(transport)
        self._strangers[self] = self.loop.call_later(STRANGER_S, transport.abort)
        if len(self._strangers) > MAX_STRANGERS:
            oldest = next(iter(self._strangers))
            oldest.forget()
            oldest.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forgets a connection that has ended."""
        self.forget()
        super().connection_lost(exc)

    def forget(self) -> None:
        """Lets the connection be: it has shown the token, or is over."""
        if timer := self._strangers.pop(self, None):
            timer.cancel()
