"""Between gRPC and our methods: bytes become messages, exceptions become status. Methods just raise."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from services.runtime.rpc.limits import MAX_REQUEST_BYTES, CallLimit
from splitppo.rpc.errors import Internal, InvalidArgument, LimitExceeded, Place, abort, wire_error

log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext
# (message or iterator of serialised messages, context) -> message or async iterator of messages, serialised or not
Method = Callable[[Any, Any], Any]


def service_handler(
    service: ServiceDescriptor, methods: Mapping[str, Method], role: str, limit: CallLimit
) -> grpc.GenericRpcHandler[Any, Any]:
    """A gRPC handler for the methods of a service that are given; the rest is UNIMPLEMENTED."""
    handlers = {}
    for descriptor in (method for method in service.methods if method.name in methods):
        place = Place(role=role, method=descriptor.name)
        adapter = _MethodAdapter(methods[descriptor.name], GetMessageClass(descriptor.input_type), place, limit)
        # Requests arrive as bytes, so that a message that cannot be read is the caller's mistake, not ours.
        make: Any
        make, behaviour = {
            (False, False): (grpc.unary_unary_rpc_method_handler, adapter.unary),
            (True, False): (grpc.stream_unary_rpc_method_handler, adapter.unary),
            (False, True): (grpc.unary_stream_rpc_method_handler, adapter.unary_stream),
        }[descriptor.client_streaming, descriptor.server_streaming]
        handlers[descriptor.name] = make(behaviour, response_serializer=_serialise)
    return grpc.method_handlers_generic_handler(service.full_name, handlers)


@dataclass(frozen=True)
class _MethodAdapter:
    method: Method
    request_type: type[Message]
    place: Place
    limit: CallLimit

    async def unary(self, request: bytes | AsyncIterator[bytes], context: Context[Any, Any]) -> Any:
        """One reply. A stream of requests is passed on as it comes: its reader takes chunks without copies."""
        try:
            with self.limit.one():
                return await self.method(self._read(request) if isinstance(request, bytes) else request, context)
        except Exception as error:  # noqa: BLE001 - every error becomes a status
            await self._abort(context, error)

    async def unary_stream(self, request: bytes, context: Context[Any, Any]) -> AsyncIterator[Any]:
        try:
            with self.limit.one():
                async for reply in self.method(self._read(request), context):
                    yield reply
        except Exception as error:  # noqa: BLE001 - every error becomes a status
            await self._abort(context, error)

    def _read(self, request: bytes) -> Message:
        if len(request) > MAX_REQUEST_BYTES:
            raise LimitExceeded(f"a request of {len(request)} bytes is over the limit of {MAX_REQUEST_BYTES}")
        try:
            return self.request_type.FromString(request)
        except DecodeError as error:
            raise InvalidArgument(f"the message is not a {self.request_type.DESCRIPTOR.full_name}") from error

    async def _abort(self, context: Context[Any, Any], error: Exception) -> None:
        if isinstance(error, grpc.aio.AbortError):
            raise error
        refusal = wire_error(error).at(self.place)
        if isinstance(refusal, Internal) and not isinstance(error, Internal):
            log.error("%s: a bug", self.place, exc_info=error)
        _forget_frames(error)
        await abort(context, refusal)


def _forget_frames(error: BaseException) -> None:
    """Lets go of the messages in the frames of an error: gRPC's own error, a cycle, holds on to the one behind it."""
    behind: list[BaseException | None] = [error]
    seen: set[int] = set()  # what is behind an error may be a circle
    while behind:
        one = behind.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            one.__traceback__ = None
            behind += [one.__cause__, one.__context__]


def _serialise(message: Message | bytes) -> bytes:
    return message if isinstance(message, bytes) else message.SerializeToString()
