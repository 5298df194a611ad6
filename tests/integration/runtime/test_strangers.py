"""Callers without the token cannot use up the controller's calls or stop the health service."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from splitppo.rpc.channel_options import MAX_CONNECTIONS
from tests.integration.runtime import toy
from tests.integration.runtime.client import Client, error_of, experience, result
from tests.integration.runtime.conftest import StartToy, token_only
from tests.support.groups import wait_until

WATCH, CHECK = "/grpc.health.v1.Health/Watch", "/grpc.health.v1.Health/Check"
GET_BATCH = "/splitppo.v1.WorkerService/GetBatch"
STREAMS_OF_A_CONNECTION = 100
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture(scope="module")
def client(start_module_toy: StartToy, tmp_path_factory: pytest.TempPathFactory) -> Client:
    return start_module_toy(security=token_only(tmp_path_factory.mktemp("token"))).client


@pytest.fixture
def address(client: Client) -> str:
    return client.address


@pytest.fixture
def health(address: str) -> Iterator[Any]:
    with grpc.insecure_channel(address) as channel:
        yield health_pb2_grpc.HealthStub(channel)  # type: ignore[no-untyped-call]


class Stranger:
    """A bare HTTP/2 connection that opens calls, takes no byte of an answer's message, and ends none."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._connection = socket.create_connection((host, int(port)), timeout=10.0)
        self._connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(4, 0, 0, b"\x00\x04\x00\x00\x00\x00"))
        self._next_stream = 1

    def open_call(self, method: str, *, with_request: bool) -> None:
        """`with_request`: an empty message; else only the headers."""
        fields = {":method": "POST", ":scheme": "http", ":path": method, ":authority": "x"}
        fields |= {"te": "trailers", "content-type": "application/grpc"}
        headers = b"".join(b"\x00" + _string(name) + _string(value) for name, value in fields.items())
        frames = _frame(1, 4, self._next_stream, headers)
        if with_request:
            frames += _frame(0, 1, self._next_stream, bytes(5))
        self._connection.sendall(frames)
        self._next_stream += 2

    def is_closed(self) -> bool:
        """True once the other side has hung up."""
        self._connection.setblocking(False)
        try:
            while self._connection.recv(1 << 16):
                pass
        except BlockingIOError:
            return False
        except OSError:
            pass
        return True

    def __enter__(self) -> Stranger:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def _string(text: str) -> bytes:
    return bytes([len(text)]) + text.encode()


def check(health: Any) -> health_pb2.HealthCheckResponse.ServingStatus:
    return health.Check(health_pb2.HealthCheckRequest(), timeout=20).status


@pytest.mark.parametrize(
    ("method", "with_request"), [(WATCH, True), (WATCH, False), (CHECK, False), (GET_BATCH, False)]
)
def test_400_calls_of_strangers_take_none_of_the_controllers(
    client: Client, address: str, health: Any, method: str, with_request: bool
) -> None:
    with ExitStack() as stack:
        for _ in range(400 // STREAMS_OF_A_CONNECTION):
            stranger = stack.enter_context(Stranger(address))
            for _ in range(STREAMS_OF_A_CONNECTION):
                stranger.open_call(method, with_request=with_request)
        for _ in range(20):
            client.put(experience(1), prompts=[[1, 2], [3]])
            assert client.get(experience(1), "prompts").num_rows == 2
            assert check(health) == SERVING


def test_a_watcher_that_takes_nothing_keeps_no_other_from_the_news(client: Client, address: str, health: Any) -> None:
    with Stranger(address) as stranger:
        stranger.open_call(WATCH, with_request=True)
        watch = health.Watch(health_pb2.HealthCheckRequest(), timeout=20)
        assert next(watch).status == SERVING
        client.put(experience(1), prompts=[[toy.FAIL_AFTER_STEP], [1]], responses=[[1], [1]], returns=[[0.5], [0.5]])
        error_of(client.update(1))
        assert next(watch).status == NOT_SERVING
        assert check(health) == NOT_SERVING
        result(client.load(0, base_step=0))
        assert next(watch).status == SERVING
        watch.cancel()


def test_a_new_watcher_takes_the_place_of_the_oldest(address: str, health: Any) -> None:
    oldest = health.Watch(health_pb2.HealthCheckRequest(), timeout=20)
    assert next(oldest).status == SERVING
    with Stranger(address) as stranger:
        for _ in range(STREAMS_OF_A_CONNECTION):
            stranger.open_call(WATCH, with_request=True)
        with pytest.raises(grpc.RpcError) as ended:
            next(oldest)
        assert ended.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED  # type: ignore[attr-defined]
        newest = health.Watch(health_pb2.HealthCheckRequest(), timeout=20)
        assert next(newest).status == SERVING
        newest.cancel()


def test_connections_of_strangers_have_a_bound_and_leave_the_controllers(client: Client, address: str) -> None:
    client.status()
    with ExitStack() as stack:
        strangers = [stack.enter_context(Stranger(address)) for _ in range(MAX_CONNECTIONS + 10)]
        wait_until(lambda: sum(stranger.is_closed() for stranger in strangers) >= 10, what="connections closed")
        client.status()
