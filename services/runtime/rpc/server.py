"""Runs the gRPC server of rank 0 on its own thread and event loop, so that calls are answered during commands."""

import asyncio
import logging
import socket
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass

import grpc.aio
import uvloop
from google.protobuf.descriptor import ServiceDescriptor

from services.runtime.failures.heartbeat import VitalSign
from services.runtime.rpc.auth_interceptor import TokenInterceptor
from services.runtime.rpc.diagnosis import DiagnosisServicer
from services.runtime.rpc.health import SERVICE as HEALTH
from services.runtime.rpc.health import HealthServicer
from services.runtime.rpc.limits import CallLimit
from services.runtime.rpc.method_adapter import Method, methods_of, service_handler
from services.runtime.rpc.reflection import add_reflection
from services.runtime.rpc.servicer import WorkerServicer, command_method, message_method, service_of
from services.runtime.state.worker import Worker
from splitppo.config.subsections.security import SecurityConfig
from splitppo.rpc.channel_options import SERVER_OPTIONS
from splitppo.rpc.credentials import PLAINTEXT, Credentials
from splitppo.v1 import worker_pb2

log = logging.getLogger(__name__)

_START_TIMEOUT_S = 30.0
# When the server stops, answers that are being sent get this long.
_STOP_GRACE_S = 2.0


@dataclass
class Server:
    """The gRPC server of a worker: WorkerService, the services of the role's commands, health and reflection.

    `vital_signs` returns the last heartbeat of each rank, by rank.
    """

    worker: Worker
    bind: str
    security: SecurityConfig
    credentials: Credentials = PLAINTEXT
    vital_signs: Callable[[], Mapping[int, VitalSign]] = dict

    def __post_init__(self) -> None:
        self._services = self._methods_by_service()
        self._address: Future[str] = Future()
        self._thread = threading.Thread(target=self._run, name="grpc", daemon=True)

    def _methods_by_service(self) -> dict[ServiceDescriptor, dict[str, Method]]:
        """Returns the RPCs of each proto service of this worker, by name: its own, and those of its commands."""
        own = worker_pb2.DESCRIPTOR.services_by_name["WorkerService"]
        diagnosis = DiagnosisServicer(self.worker, self.credentials, self.vital_signs)
        methods = {own: methods_of(WorkerServicer(self.worker), own) | methods_of(diagnosis, own)}
        for command in self.worker.commands:
            of_service = methods.setdefault(service_of(command), {})
            of_service[command.method] = command_method(self.worker, command)
            if (messages := command.messages) is not None:
                of_service[messages.method] = message_method(self.worker, command, messages)
        return methods

    def start(self) -> str:
        """Starts the server's thread and returns its address as host:port; ValueError if it cannot listen on `bind`."""
        self._thread.start()
        return self._address.result(_START_TIMEOUT_S)

    def stop(self) -> None:
        """Stops the gRPC server and its thread; replies that are being sent get 2 seconds to finish."""
        self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join(_STOP_GRACE_S + 2.0)

    def _run(self) -> None:
        """Runs the server on this thread; an error before the address is known is raised by `start`."""
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(self._serve())
        except Exception as error:
            if self._address.done():
                log.exception("the gRPC thread failed")
            else:
                self._address.set_exception(error)

    async def _serve(self) -> None:
        """Serves calls until `stop`; the address is known to `start` as soon as the server listens.

        Health follows the worker's state: a change in another thread is published on this event loop.
        """
        _check_free(self.bind)
        self._loop = asyncio.get_running_loop()
        self._stopping = asyncio.Event()
        role_name = self.worker.context.role_name
        max_calls = self.worker.context.config.services.max_calls
        tokens = self.credentials.tokens
        open_health = self.security.open_health
        server = grpc.aio.server(
            interceptors=[TokenInterceptor(tokens, role_name, open_health=open_health)] if tokens else [],
            options=list(SERVER_OPTIONS),
        )
        limit = CallLimit(max_calls, "services.max_calls")
        for service, methods in self._services.items():
            server.add_generic_rpc_handlers((service_handler(service, methods, role_name, limit),))
        health = HealthServicer(service.full_name for service in self._services)
        server.add_generic_rpc_handlers(health.handlers(role_name))
        if self.security.reflection:
            add_reflection([service.full_name for service in (*self._services, HEALTH)], server)
        port = self.credentials.listen(server, self.bind)
        await server.start()

        def publish() -> None:
            health.set(is_serving=self.worker.is_serving)

        self.worker.on_change = lambda: self._loop.call_soon_threadsafe(publish)
        publish()
        self._address.set_result(_reachable(self.bind, port))
        await self._stopping.wait()
        self.worker.on_change = lambda: None
        health.set(is_serving=False)
        await server.stop(_STOP_GRACE_S)


def _reachable(bind: str, port: int) -> str:
    """Returns the address host:port for callers of a server; a wildcard host becomes the name of this machine."""
    host = bind.rpartition(":")[0]
    return f"{socket.gethostname() if host in ('0.0.0.0', '[::]', '') else host}:{port}"  # noqa: S104


def _check_free(bind: str) -> None:
    """Raises ValueError, one sentence, if no server can listen on address `bind`; gRPC would print many lines."""
    host, _, port = bind.rpartition(":")
    family = socket.AF_INET6 if host.startswith("[") else socket.AF_INET
    try:
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host.strip("[]"), int(port)))
    except (OSError, ValueError, OverflowError) as error:
        raise ValueError(f"cannot listen on {bind!r}: {getattr(error, 'strerror', None) or error}") from error
