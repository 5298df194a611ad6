"""The gate of the server: a call without the right token goes no further, and is written down."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

from splitppo.rpc.errors import Place, Unauthenticated, status_of
from splitppo.rpc.tokens import Tokens

log = logging.getLogger(__name__)

Handler = Any  # grpc.RpcMethodHandler
_HEALTH = "/grpc.health.v1.Health/"
# Lines that are written at once, and seconds until there is room for another one: guessing must not fill the disk.
_MAX_LINES = 10
_LINE_EVERY_S = 6.0


class TokenGate(grpc.aio.ServerInterceptor):  # type: ignore[type-arg] # not subscriptable at run time
    """Refuses calls without one of the tokens.

    Args:
        tokens: what is accepted.
        role: of the service, for errors.
        open_health: health checks need no token.
    """

    def __init__(self, tokens: Tokens, role: str, *, open_health: bool) -> None:
        self._tokens = tokens
        self._role = role
        self._open = (_HEALTH,) if open_health else ()
        self._log = RefusalLog()

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Handler]], details: Any) -> Handler:
        """The method's handler, or one that refuses."""
        handler = await continuation(details)
        if handler is None or details.method.startswith(self._open):
            return handler
        because = self._tokens.why_refused(details.invocation_metadata or ())
        return self._refusing(handler, details.method, because) if because else handler

    def _refusing(self, handler: Handler, method: str, because: str) -> Handler:
        """A handler that sends replies as the method does, and waits for no request.

        One that did would hold a call for as long as its caller sends nothing, and the right ones would find no room.
        """

        async def refuse(_: Any, context: Any) -> None:
            self._log.refused(context.peer(), method, because)
            error = Unauthenticated(
                f"{because}: this service wants a bearer token (services.security.token_file or token_env)",
                Place(role=self._role, method=method.rpartition("/")[2]),
            )
            status = status_of(error)
            await context.abort(status.code, status.details, status.trailing_metadata)

        async def refuse_streaming(request: Any, context: Any) -> Any:
            await refuse(request, context)
            yield b""  # never reached; makes this a generator

        if handler.response_streaming:
            return grpc.stream_stream_rpc_method_handler(refuse_streaming)
        return grpc.stream_unary_rpc_method_handler(refuse)


class LineBudget:
    """How many log lines may be written: some at once, then one every few seconds.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._room = float(_MAX_LINES)
        self._filled_at = clock()
        self._num_silent = 0

    def spend(self) -> int | None:
        """The number of lines that were not written before this one; None if this one must not be, either."""
        now = self._clock()
        self._room = min(_MAX_LINES, self._room + (now - self._filled_at) / _LINE_EVERY_S)
        self._filled_at = now
        if self._room < 1.0:
            self._num_silent += 1
            return None
        self._room -= 1.0
        num_silent, self._num_silent = self._num_silent, 0
        return num_silent


class RefusalLog:
    """Who was refused, where and why; not every line of a flood. Argument as for `LineBudget`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._budget = LineBudget(clock)

    def refused(self, peer: str, method: str, because: str) -> None:
        """Notes a refusal. Nothing that the caller has sent is written down, but the name of a method that exists."""
        num_silent = self._budget.spend()
        if num_silent is not None:
            before = f" ({num_silent} refusals before this one were not written down)" if num_silent else ""
            log.warning("refused %s: %s calls %s%s", because, peer, method, before)


def bound_library_log() -> None:
    """GRPC's own services (health, reflection) log a traceback for every message that they cannot read."""
    budget = LineBudget()
    logging.getLogger("grpc._cython.cygrpc").addFilter(lambda _: budget.spend() is not None)
