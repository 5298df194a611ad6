"""Connections of those who have not the token, and of the one who has it."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import uvicorn

from tests.support.groups import wait_until
from tests.support.viewed_runs import Shape, add_step, make_run
from viewer import connections
from viewer.__main__ import listen
from viewer.app import make_app
from viewer.connections import BACKLOG, MAX_STRANGERS, Connection
from viewer.run import Run

DEADLINE_S = 60.0
HALF = b"GET / HTTP/1.1\r\nHost: localhost\r\nX: "
Connect = Callable[[bytes], socket.socket]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path / "run", Shape(steps=1))


@pytest.fixture
def connect(run: Path) -> Iterator[Connect]:
    """Opens connections to a viewer, and sends what it is given.

    Each is accepted before the next one: a full backlog costs seconds, for TCP asks again after 1 s, 2 s and 4 s.
    """
    accepted: list[Connection] = []

    class Accepted(Connection):
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            accepted.append(self)

    listener = listen("127.0.0.1", 0)
    config = uvicorn.Config(
        make_app([Run(0, run)], token="the-token", is_ending=lambda: server.should_exit),
        http=Accepted,
        backlog=BACKLOG,
        log_config=None,
        lifespan="off",
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    opened: list[socket.socket] = []

    def connect_one(sent: bytes) -> socket.socket:
        opened.append(socket.create_connection(listener.getsockname()[:2], DEADLINE_S))
        wait_until(lambda: len(accepted) == len(opened), DEADLINE_S, "a connection")
        opened[-1].sendall(sent)
        return opened[-1]

    yield connect_one
    for one in opened:
        one.close()
    server.should_exit = True
    thread.join(DEADLINE_S)


def asked(path: str, token: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {token}\r\n\r\n".encode()


def received(connection: socket.socket) -> bytes:
    """Waits for what comes next, and returns it; b"" if the connection has ended."""
    try:
        return connection.recv(1 << 16)
    except ConnectionError:
        return b""


def test_of_many_half_requests_the_oldest_end_and_who_has_the_token_is_answered(connect: Connect) -> None:
    strangers = [connect(HALF) for _ in range(3 * MAX_STRANGERS)]
    assert [received(one) for one in strangers[:MAX_STRANGERS]] == [b""] * MAX_STRANGERS
    assert connect(asked("/api/runs", "the-token")).recv(12) == b"HTTP/1.1 200"


def test_a_page_that_listens_stays_while_strangers_come(connect: Connect, run: Path) -> None:
    page = connect(asked("/api/runs/0/live", "the-token")).makefile("rb")
    assert page.readline().startswith(b"HTTP/1.1 200")
    strangers = [connect(HALF) for _ in range(3 * MAX_STRANGERS)]
    assert [received(one) for one in strangers[:MAX_STRANGERS]] == [b""] * MAX_STRANGERS
    add_step(run, 2, Shape(), seed=3)
    assert any(line == b'data: {"last":2}\n' for line in page)


@pytest.mark.parametrize("sent", [b"", HALF, asked("/api/runs", "another"), asked("/", "")])
def test_without_the_token_a_connection_ends_by_itself(
    connect: Connect, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr(connections, "STRANGER_S", 0.5)
    stranger = connect(sent)
    while received(stranger):
        pass
