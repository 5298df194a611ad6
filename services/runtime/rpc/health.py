"""Implements grpc.health.v1.Health so that calls of strangers (allowed by open_health) cannot disturb other calls.

The servicer of grpcio-health-checking writes to a watcher under a lock. There a watcher that reads nothing stops all
the other watchers, and with them every change of the status.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Any

import grpc
from grpc_health.v1 import health_pb2

from services.runtime.rpc.limits import CallLimit
from services.runtime.rpc.method_adapter import methods_of, service_handler
from splitppo.rpc.errors import NotFound

SERVICE = health_pb2.DESCRIPTOR.services_by_name["Health"]
# Open calls of each method; they do not count for services.max_calls.
_MAX_CALLS = 64


class HealthServicer:
    """Answers Check and Watch with the health status of a server, the same for all its services. Not thread-safe."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = {"", *names}
        self._status = health_pb2.HealthCheckResponse.SERVING
        self._changed = asyncio.Event()

    def handlers(self, role: str) -> tuple[grpc.GenericRpcHandler[Any, Any], ...]:
        """Returns gRPC handlers of Check and Watch; each has its own call limit, so watches cannot block checks."""
        return tuple(
            service_handler(SERVICE, {name: method}, role, CallLimit(_MAX_CALLS, ends_oldest=True))
            for name, method in methods_of(self, SERVICE).items()
        )

    def set(self, *, is_serving: bool) -> None:
        answer = health_pb2.HealthCheckResponse
        self._status = answer.SERVING if is_serving else answer.NOT_SERVING
        self._changed.set()
        self._changed = asyncio.Event()

    async def check(self, request: health_pb2.HealthCheckRequest, _: Any) -> health_pb2.HealthCheckResponse:
        if request.service not in self._names:
            raise NotFound(f"there is no service {request.service!r}")
        return health_pb2.HealthCheckResponse(status=self._status)

    async def watch(
        self, request: health_pb2.HealthCheckRequest, _: Any
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        """Streams the health status of the named service: now, and again whenever the status changes."""
        last = None
        while True:
            changed = self._changed
            status = self._status if request.service in self._names else health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
            if status != last:
                yield health_pb2.HealthCheckResponse(status=status)
                last = status
            await changed.wait()
