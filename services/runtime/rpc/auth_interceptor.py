"""Checks the bearer token of each gRPC call; a call without the right token is refused and logged."""

import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

from splitppo.rpc.bearer_tokens import BearerTokens
from splitppo.rpc.errors import Place, Unauthenticated, abort

Handler = Any  # grpc.RpcMethodHandler
_HEALTH = "/grpc.health.v1.Health/"
# Lines that are logged at once, and seconds until there is room for one more: guessing must not fill the disk.
_MAX_LINES = 10
_LINE_EVERY_S = 6.0


class LineLimit(logging.Filter):
    """Limits a logger to 10 lines at once, then one per 6 seconds; that line gives the number of dropped lines."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._room = float(_MAX_LINES)
        self._filled_at = clock()
        self._num_left_out = 0

    def filter(self, record: logging.LogRecord) -> bool:
        """Returns True if a line may be written; a line after dropped ones also says how many they were.

        This is a token bucket: each line takes 1 of `_room`, which grows with time up to _MAX_LINES.
        """
        now = self._clock()
        self._room = min(_MAX_LINES, self._room + (now - self._filled_at) / _LINE_EVERY_S)
        self._filled_at = now
        if self._room < 1.0:
            self._num_left_out += 1
            return False
        self._room -= 1.0
        if self._num_left_out:
            record.msg = f"{record.msg} ({self._num_left_out} lines like it before were not written down)"
            self._num_left_out = 0
        return True


# The log of refused calls has nothing that the caller has sent but the name of a method that exists. gRPC's own
# services (health, reflection) log a traceback for every message that they cannot read.
refusals = logging.getLogger(f"{__name__}.refusals")
for _flooded in (refusals, logging.getLogger("grpc._cython.cygrpc")):
    _flooded.addFilter(LineLimit())


class TokenInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg] # not subscriptable at run time
    """Refuses gRPC calls without one of the accepted bearer tokens; with `open_health`, health checks need none."""

    def __init__(self, tokens: BearerTokens, role: str, *, open_health: bool) -> None:
        self._tokens = tokens
        self._role = role
        self._open = (_HEALTH,) if open_health else ()

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Handler]], details: Any) -> Handler:
        handler = await continuation(details)
        if handler is None or details.method.startswith(self._open):
            return handler
        because = self._tokens.why_refused(details.invocation_metadata or ())
        return self._refusing(handler, details.method, because) if because else handler

    def _refusing(self, handler: Handler, method: str, because: str) -> Handler:
        """Returns a gRPC handler that refuses calls of a method at once, without waiting for a request message.

        The handler replies as the method does, with a stream or one message. If it waited for a request, calls of
        strangers that send nothing would stay open, and leave no room for others.
        """

        async def refuse(_: Any, context: Any) -> None:
            refusals.warning("refused %s: %s calls %s", because, context.peer(), method)
            wanted = "this service wants a bearer token (services.security.token_file or token_env)"
            place = Place(role=self._role, method=method.rpartition("/")[2])
            await abort(context, Unauthenticated(f"{because}: {wanted}", place))

        streaming = grpc.stream_stream_rpc_method_handler
        single = grpc.stream_unary_rpc_method_handler
        return (streaming if handler.response_streaming else single)(refuse)
