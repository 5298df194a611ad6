"""The layer between gRPC and the servicer, without a server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest

from services.runtime.rpc.limits import CallLimit
from services.runtime.rpc.method_adapter import service_handler
from splitppo.rpc.errors import StorageFailed
from splitppo.v1 import worker_pb2


class Aborted(grpc.aio.AbortError):
    pass


class Context:
    """The context of a call; records the status with which it ends."""

    code: grpc.StatusCode | None = None

    async def abort(self, code: grpc.StatusCode, *_: Any) -> None:
        self.code = code
        raise Aborted


class Details:
    method = "/splitppo.v1.WorkerService/GetStatus"
    invocation_metadata = ()


async def requests(*messages: bytes) -> AsyncIterator[bytes]:
    for message in messages:
        yield message


@pytest.mark.timeout(20)
async def test_an_error_that_is_its_own_cause_ends_its_call_and_not_the_service() -> None:
    error, cause = StorageFailed("no room"), OSError("no room")
    error.__cause__ = cause
    cause.__cause__ = cause

    async def fail(*_: Any) -> None:
        raise error

    service = worker_pb2.DESCRIPTOR.services_by_name["WorkerService"]
    handler: Any = service_handler(service, {"GetStatus": fail}, "actor", CallLimit(1))
    context = Context()
    with pytest.raises(Aborted):
        await handler.service(Details).stream_unary(requests(b""), context)
    assert context.code is grpc.StatusCode.FAILED_PRECONDITION
    assert error.__traceback__ is None


async def test_a_call_without_a_request_is_the_callers_mistake() -> None:
    service = worker_pb2.DESCRIPTOR.services_by_name["WorkerService"]
    handler: Any = service_handler(service, {"GetStatus": lambda *_: None}, "actor", CallLimit(1))
    context = Context()
    with pytest.raises(Aborted):
        await handler.service(Details).stream_unary(requests(), context)
    assert context.code is grpc.StatusCode.INVALID_ARGUMENT
