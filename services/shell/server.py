"""The gRPC server of rank 0, on a thread and an event loop of its own, so that it answers while the engine works."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import grpc.aio
import uvloop
from google.protobuf.descriptor import ServiceDescriptor
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from services.shell.bounds import CallLimit
from services.shell.commands import Command
from services.shell.edge import Method, service_handler
from services.shell.gate import TokenGate, bound_library_log
from services.shell.servicer import WorkerServicer, command_method, service_of
from services.shell.worker import Worker
from splitppo.config import SecurityConfig
from splitppo.rpc.options import SERVER_OPTIONS
from splitppo.rpc.security import PLAINTEXT, Credentials
from splitppo.v1 import worker_pb2

log = logging.getLogger(__name__)

_START_TIMEOUT_S = 30.0
# Streams that still run when the server stops: answers on their way get this long.
_STOP_GRACE_S = 2.0
# Beyond services.max_calls: health checks, which must be answered then too, reflection, and calls that are refused.
_ROOM_FOR_OTHERS = 64


class Server:
    """Serves a worker: WorkerService, the role's own service, health and reflection.

    Args:
        worker: who answers.
        commands: the RPCs that go through its mailbox.
        bind: host:port to listen on.
        security: what is open to callers without a token, and whether there is reflection.
        credentials: what callers must show, and what they are shown.
    """

    def __init__(
        self,
        worker: Worker,
        commands: Sequence[Command],
        bind: str,
        security: SecurityConfig,
        credentials: Credentials = PLAINTEXT,
    ) -> None:
        self._worker = worker
        self._bind = bind
        self._security = security
        self._credentials = credentials
        self._methods: dict[str, dict[str, Method]] = defaultdict(dict)
        self._services: dict[str, ServiceDescriptor] = {}
        worker_service = worker_pb2.DESCRIPTOR.services_by_name["WorkerService"]
        self._services[worker_service.full_name] = worker_service
        self._methods[worker_service.full_name].update(WorkerServicer(worker).methods())
        for command in commands:
            service = service_of(command)
            self._services[service.full_name] = service
            self._methods[service.full_name][command.method] = command_method(worker, command)
        self._address: Future[str] = Future()
        self._thread = threading.Thread(target=self._run, name="grpc", daemon=True)

    def start(self) -> str:
        """Starts the thread; returns the address that it listens on.

        Raises:
            ValueError: the server cannot listen there.
        """
        self._thread.start()
        return self._address.result(_START_TIMEOUT_S)

    def stop(self) -> None:
        """Sends the answers that are on their way, then ends the thread."""
        self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join(_STOP_GRACE_S + 2.0)

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(self._serve())
        except Exception as error:
            if self._address.done():
                log.exception("the gRPC thread failed")
            else:
                self._address.set_exception(error)

    async def _serve(self) -> None:
        _check_free(self._bind)
        self._loop = asyncio.get_running_loop()
        self._stopping = asyncio.Event()
        bound_library_log()
        max_calls = self._worker.context.config.services.max_calls
        server = grpc.aio.server(
            interceptors=self._gates(),
            options=list(SERVER_OPTIONS),
            maximum_concurrent_rpcs=max_calls + _ROOM_FOR_OTHERS,
        )
        limit = CallLimit(max_calls)
        for name, service in self._services.items():
            handler = service_handler(service, self._methods[name], self._worker.context.role_name, limit)
            server.add_generic_rpc_handlers((handler,))
        health_servicer = health.aio.HealthServicer()  # type: ignore[attr-defined]
        health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
        if self._security.reflection:
            names = [*self._services, health.SERVICE_NAME, reflection.SERVICE_NAME]
            reflection.enable_server_reflection(names, server)
        port = self._credentials.listen(server, self._bind)
        await server.start()
        await self._publish_health(health_servicer)

        def publish() -> None:
            asyncio.run_coroutine_threadsafe(self._publish_health(health_servicer), self._loop)

        self._worker.on_change(publish)
        self._address.set_result(_reachable(self._bind, port))
        await self._stopping.wait()
        self._worker.on_change(lambda: None)
        await health_servicer.enter_graceful_shutdown()
        await server.stop(_STOP_GRACE_S)

    def _gates(self) -> list[TokenGate]:
        tokens = self._credentials.tokens
        if tokens is None:
            return []
        return [TokenGate(tokens, self._worker.context.role_name, open_health=self._security.open_health)]

    async def _publish_health(self, servicer: Any) -> None:
        serving = health_pb2.HealthCheckResponse
        status = serving.SERVING if self._worker.is_serving else serving.NOT_SERVING
        for name in ("", *self._services):
            await servicer.set(name, status)


def _reachable(bind: str, port: int) -> str:
    """host:port for callers; a wildcard host stands for this machine."""
    host = bind.rpartition(":")[0]
    return f"{socket.gethostname() if host in ('0.0.0.0', '[::]', '') else host}:{port}"  # noqa: S104


def _check_free(bind: str) -> None:
    """Raises ValueError if nothing can listen there: gRPC itself would say so in a dump of many lines."""
    host, _, port = bind.rpartition(":")
    family = socket.AF_INET6 if host.startswith("[") else socket.AF_INET
    try:
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host.strip("[]"), int(port)))
    except (OSError, ValueError, OverflowError) as error:
        raise ValueError(f"cannot listen on {bind!r}: {getattr(error, 'strerror', None) or error}") from error
