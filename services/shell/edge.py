"""The edge of the server: bytes become messages, exceptions become status. RPCs behind it just raise."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import grpc
import grpc.aio
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from services.shell.bounds import MAX_REQUEST_BYTES, CallLimit
from splitppo.rpc.errors import Internal, InvalidArgument, LimitExceeded, Place, status_of, wire_error

log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext
# (message or iterator of serialised messages, context) -> message or async iterator of messages, serialised or not
Method = Callable[[Any, Any], Any]


def service_handler(
    service: ServiceDescriptor, methods: Mapping[str, Method], role: str, limit: CallLimit
) -> grpc.GenericRpcHandler[Any, Any]:
    """A gRPC handler for the methods of a service that are given; the rest is UNIMPLEMENTED."""
    handlers = {}
    for descriptor in service.methods:
        if descriptor.name not in methods:
            continue
        edge = _Edge(methods[descriptor.name], GetMessageClass(descriptor.input_type), role, descriptor.name, limit)
        # Requests arrive as bytes, so that a message that cannot be read is the caller's mistake, not ours.
        make: Any
        make, behaviour = {
            (False, False): (grpc.unary_unary_rpc_method_handler, edge.unary),
            (True, False): (grpc.stream_unary_rpc_method_handler, edge.stream_unary),
            (False, True): (grpc.unary_stream_rpc_method_handler, edge.unary_stream),
        }[descriptor.client_streaming, descriptor.server_streaming]
        handlers[descriptor.name] = make(behaviour, response_serializer=_serialise)
    return grpc.method_handlers_generic_handler(service.full_name, handlers)


class _Edge:
    """One RPC method."""

    def __init__(self, method: Method, request_type: type[Message], role: str, name: str, limit: CallLimit) -> None:
        self._method = method
        self._request_type = request_type
        self._limit = limit
        self._place = Place(role=role, method=name)

    async def unary(self, request: bytes, context: Context[Any, Any]) -> Any:
        try:
            with self._limit.one():
                return await self._method(self._read(request), context)
        except Exception as error:  # noqa: BLE001 - the edge
            await self._abort(context, error)

    async def stream_unary(self, requests: AsyncIterator[bytes], context: Context[Any, Any]) -> Any:
        try:
            # A stream is passed on as it comes: its reader takes chunks without protobuf's copies.
            with self._limit.one():
                return await self._method(requests, context)
        except Exception as error:  # noqa: BLE001 - the edge
            await self._abort(context, error)

    async def unary_stream(self, request: bytes, context: Context[Any, Any]) -> AsyncIterator[Any]:
        try:
            with self._limit.one():
                async for reply in self._method(self._read(request), context):
                    yield reply
        except Exception as error:  # noqa: BLE001 - the edge
            await self._abort(context, error)

    def _read(self, request: bytes) -> Message:
        if len(request) > MAX_REQUEST_BYTES:
            raise LimitExceeded(f"a request of {len(request)} bytes is over the limit of {MAX_REQUEST_BYTES}")
        try:
            return self._request_type.FromString(request)
        except DecodeError as error:
            raise InvalidArgument(f"the message is not a {self._request_type.DESCRIPTOR.full_name}") from error

    async def _abort(self, context: Context[Any, Any], error: Exception) -> None:
        if isinstance(error, grpc.aio.AbortError):
            raise error
        refusal = wire_error(error).at(self._place)
        if isinstance(refusal, Internal) and not isinstance(error, Internal):
            log.error("%s: a bug", self._place, exc_info=error)
        status = status_of(refusal)
        _forget_frames(error)
        await context.abort(status.code, status.details, status.trailing_metadata)


def _forget_frames(error: BaseException) -> None:
    """Lets go of the messages in the frames of an error: gRPC's own error, a cycle, holds on to the one behind it.

    What is behind an error may be a circle.
    """
    behind: list[BaseException | None] = [error]
    seen: set[int] = set()
    while behind:
        one = behind.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            one.__traceback__ = None
            behind += [one.__cause__, one.__context__]


def _serialise(message: Message | bytes) -> bytes:
    return message if isinstance(message, bytes) else message.SerializeToString()
