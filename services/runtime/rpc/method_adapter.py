"""Adapts Python methods to gRPC: parses request bytes into messages, and turns exceptions into gRPC statuses."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from services.runtime.rpc.limits import CallLimit
from splitppo import failpoints
from splitppo.rpc.errors import Internal, InvalidArgument, Place, abort, wire_error
from splitppo.rpc.wire_format import MAX_REQUEST_BYTES, parse

log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext
# (message or iterator of serialised messages, context) -> message or async iterator of messages, serialised or not
Method = Callable[[Any, Any], Any]


def methods_of(servicer: object, service: ServiceDescriptor) -> dict[str, Method]:
    """Returns the RPCs of a proto service that an object implements, by name: GetStatus is its method `get_status`."""
    names = {method.name: failpoints.point_of(method.name) for method in service.methods}
    return {name: getattr(servicer, attribute) for name, attribute in names.items() if hasattr(servicer, attribute)}


def service_handler(
    service: ServiceDescriptor, methods: Mapping[str, Method], role: str, limit: CallLimit
) -> grpc.GenericRpcHandler[Any, Any]:
    """Returns a gRPC handler for some methods of a proto service; calls of its other methods get UNIMPLEMENTED."""
    handlers = {}
    for descriptor in (method for method in service.methods if method.name in methods):
        place = Place(role=role, method=descriptor.name)
        request_type = None if descriptor.client_streaming else GetMessageClass(descriptor.input_type)
        adapter = _MethodAdapter(methods[descriptor.name], request_type, place, limit)
        # Requests arrive as bytes, so that a message that cannot be read is the caller's mistake, not ours. They arrive
        # as streams, because gRPC would wait for a single request before the call is counted.
        make: Any
        make, behaviour = {
            False: (grpc.stream_unary_rpc_method_handler, adapter.one_reply),
            True: (grpc.stream_stream_rpc_method_handler, adapter.replies),
        }[descriptor.server_streaming]
        handlers[descriptor.name] = make(behaviour, response_serializer=_serialise)
    return grpc.method_handlers_generic_handler(service.full_name, handlers)


@dataclass(frozen=True)
class _MethodAdapter:
    method: Method
    request_type: type[Message] | None  # None: a stream of bytes, whose reader takes chunks without copies
    place: Place
    limit: CallLimit

    async def one_reply(self, requests: AsyncIterator[bytes], context: Context[Any, Any]) -> Any:
        try:
            async with self.limit.call():
                return await self.method(await self._read(requests), context)
        except Exception as error:  # noqa: BLE001 - every error becomes a status
            await self._abort(context, error)

    async def replies(self, requests: AsyncIterator[bytes], context: Context[Any, Any]) -> AsyncIterator[Any]:
        try:
            async with self.limit.call():
                async for reply in self.method(await self._read(requests), context):
                    yield reply
        except Exception as error:  # noqa: BLE001 - every error becomes a status
            await self._abort(context, error)

    async def _read(self, requests: AsyncIterator[bytes]) -> Message | AsyncIterator[bytes]:
        """Reads the one request of a call; a method that takes a stream gets the stream of bytes itself."""
        if self.request_type is None:
            return requests
        if (request := await anext(aiter(requests), None)) is None:
            raise InvalidArgument(f"expected a {self.request_type.DESCRIPTOR.full_name}, got no message")
        return parse(request, self.request_type, MAX_REQUEST_BYTES)

    async def _abort(self, context: Context[Any, Any], error: Exception) -> None:
        """Answers a call with the status of an error, and logs one that is a bug with its traceback.

        The error's tracebacks are dropped then: they would keep the messages of the call in memory.
        """
        if isinstance(error, grpc.aio.AbortError):
            raise error
        refusal = wire_error(error).at(self.place)
        if isinstance(refusal, Internal) and not isinstance(error, Internal):
            log.error("%s: a bug", self.place, exc_info=error)
        _forget_frames(error)
        await abort(context, refusal)


def _forget_frames(error: BaseException) -> None:
    """Drops the tracebacks of an error and of its causes, because their frames keep large messages in memory.

    gRPC's own error refers to the error before it, and is part of a cycle: the messages would stay in memory.
    """
    behind: list[BaseException | None] = [error]
    seen: set[int] = set()  # the chain of causes may be a cycle
    while behind:
        cause = behind.pop()
        if cause is not None and id(cause) not in seen:
            seen.add(id(cause))
            cause.__traceback__ = None
            behind += [cause.__cause__, cause.__context__]


def _serialise(message: Message | bytes) -> bytes:
    return message if isinstance(message, bytes) else message.SerializeToString()
