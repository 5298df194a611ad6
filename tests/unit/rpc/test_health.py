"""The health check of the command line: one line, and an exit status of 0 only if the server serves."""

from __future__ import annotations

import datetime as dt
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health as grpc_health
from grpc_health.v1 import health_pb2, health_pb2_grpc

from splitppo.rpc.channel_options import SERVER_OPTIONS
from splitppo.rpc.health import main
from tests.support.certificates import TOKEN
from tools import certs

SERVING = health_pb2.HealthCheckResponse.SERVING
# One byte of length, two bytes of it, and characters of two bytes.
NAMES = ["splitppo.v1.ActorService", "x" * 127, "x" * 128, "ü" * 200]

Start = Callable[..., str]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a server of a servicer, or of none, and gives its address."""
    servers = []

    def serve(servicer: Any = None, credentials: grpc.ServerCredentials | None = None) -> str:
        server = grpc.server(futures.ThreadPoolExecutor(2), options=list(SERVER_OPTIONS))
        if servicer is not None:
            health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
        bind = "127.0.0.1:0"
        port = server.add_secure_port(bind, credentials) if credentials else server.add_insecure_port(bind)
        server.start()
        servers.append(server)
        return f"127.0.0.1:{port}"

    yield serve
    for server in servers:
        server.stop(0).wait()


@pytest.fixture
def says(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Runs the command; (exit status, its only line without the address)."""

    def run(address: str, *arguments: str, timeout: str = "60") -> tuple[int, str]:
        code = main([address, "--timeout", timeout, *arguments])
        out, error = capsys.readouterr()
        [line] = (error if code == 2 else out).splitlines()
        assert not (out if code == 2 else error)
        return code, line.removeprefix(address)

    return run


Says = Callable[..., tuple[int, str]]


@pytest.mark.parametrize("service", ["", *NAMES], ids=["the server", "a service", "127 bytes", "128 bytes", "umlauts"])
def test_a_server_that_serves_is_0_and_one_that_does_not_is_1(start: Start, says: Says, service: str) -> None:
    servicer = grpc_health.HealthServicer()
    address = start(servicer)
    arguments, shown = (("--service", service), f" {service}") if service else ((), "")
    servicer.set(service, SERVING)
    assert says(address, *arguments) == (0, f"{shown}: SERVING")
    servicer.set(service, health_pb2.HealthCheckResponse.NOT_SERVING)
    assert says(address, *arguments) == (1, f"{shown}: NOT_SERVING")
    servicer.set(service, health_pb2.HealthCheckResponse.UNKNOWN)
    assert says(address, *arguments) == (1, f"{shown}: UNKNOWN")


def test_what_is_not_there_is_1_and_named(start: Start, says: Says) -> None:
    address = start(grpc_health.HealthServicer())
    assert says(address, "--service", "nobody") == (1, " nobody: not found: the server has no service of this name")
    assert says(start())[1] == ": not a health service: the server does not have grpc.health.v1"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        nobody = f"127.0.0.1:{free.getsockname()[1]}"
        assert says(nobody) == (1, ": unreachable: nothing listens there (connection refused)")
    assert says("no.such.host.invalid:1")[1].startswith(": unreachable: its name cannot be resolved")


def test_a_server_that_says_nothing_is_given_up(says: Says) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        code, line = says(f"127.0.0.1:{silent.getsockname()[1]}", timeout="0.5")
    assert (code, line.startswith(": unreachable: ")) == (1, True)
    assert "0.5 s" in line


def test_an_answer_that_never_comes_is_given_up(start: Start, says: Says) -> None:
    class Hanging(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
        def Check(self, request: Any, context: Any) -> Any:
            ended.result(60)

    ended: futures.Future[None] = futures.Future()
    try:
        assert says(start(Hanging()), timeout="1") == (1, ": unreachable: no answer within 1 s")
    finally:
        ended.set_result(None)


def test_a_token_is_shown_where_the_server_wants_one(start: Start, says: Says, tmp_path: Path) -> None:
    class Closed(grpc_health.HealthServicer):  # type: ignore[misc]
        def Check(self, request: Any, context: Any) -> Any:
            if ("authorization", f"Bearer {TOKEN}") not in context.invocation_metadata():
                context.abort(grpc.StatusCode.UNAUTHENTICATED, "no\ntoken")
            return super().Check(request, context)

    address = start(Closed())
    code, line = says(address)
    assert (code, line) == (1, ": refused: no token (services.security.open_health is false: --token-file)")
    (tmp_path / "token").write_text(f"\n{TOKEN}\nthe-next-token-0123456789\n")
    assert says(address, "--token-file", str(tmp_path / "token")) == (0, ": SERVING")


# TLS


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certs")
    certs.write_all(folder, ["localhost"], days=90)
    return folder


@pytest.fixture
def guarded(start: Start, folder: Path) -> str:
    pair = ((folder / "actor.key").read_bytes(), (folder / "actor.pem").read_bytes())
    ca = (folder / "ca.pem").read_bytes()
    return start(grpc_health.HealthServicer(), grpc.ssl_server_credentials([pair], ca, require_client_auth=True))


def pair(folder: Path, name: str = "health") -> list[str]:
    return ["--cert", str(folder / f"{name}.pem"), "--key", str(folder / f"{name}.key")]


def test_the_pair_for_health_checks_gets_in(guarded: str, says: Says, folder: Path) -> None:
    assert says(guarded, "--ca", str(folder / "ca.pem"), *pair(folder)) == (0, ": SERVING")


def test_who_does_not_get_in_is_told_why(start: Start, guarded: str, says: Says, folder: Path, tmp_path: Path) -> None:
    certs.write_all(tmp_path, ["localhost"], days=90)
    ca = ["--ca", str(folder / "ca.pem")]
    for arguments in ([], ca, [*ca, *pair(tmp_path)], [*ca, *pair(folder, "critic")]):
        code, line = says(guarded, *arguments)
        assert (code, "it hangs up: does it want TLS, or another certificate?" in line) == (1, True), line
    code, line = says(guarded, "--ca", str(tmp_path / "ca.pem"), *pair(folder))
    assert line.startswith(": unreachable: its certificate is not accepted (")
    plaintext = start(grpc_health.HealthServicer())
    assert says(plaintext, *ca, *pair(folder)) == (1, ": unreachable: it does not speak TLS, but --ca is given")


def test_a_certificate_of_another_host_is_told_from_other_refusals(start: Start, says: Says, tmp_path: Path) -> None:
    now = dt.datetime.now(dt.UTC)
    authority, key = certs.make_authority(now)
    certs.write_pair(tmp_path / "ca", authority, key)
    made = certs.make_certificate("other", authority, key, now, now + dt.timedelta(days=7), hosts=["other"])
    certs.write_pair(tmp_path / "other", *made)
    own = ((tmp_path / "other.key").read_bytes(), (tmp_path / "other.pem").read_bytes())
    address = start(grpc_health.HealthServicer(), grpc.ssl_server_credentials([own]))
    code, line = says(address, "--ca", str(tmp_path / "ca.pem"))
    assert (code, line) == (1, ": unreachable: its certificate does not name the host that it is called by")


# Arguments


@pytest.mark.parametrize("address", ["nowhere", "host:", "host:0", "host:65536", ":7001", "a b:1", "http://host:1"])
def test_an_address_that_is_none_is_2(says: Says, address: str) -> None:
    code, line = says(address)
    assert (code, line) == (2, f"error: expected HOST:PORT, got {address!r}")


@pytest.mark.parametrize("timeout", ["0", "-1", "nan", "inf"])
def test_a_time_limit_that_is_none_is_2(says: Says, timeout: str) -> None:
    code, line = says("localhost:1", timeout=timeout)
    assert (code, line.partition(":")[0], "--timeout: expected seconds" in line) == (2, "error", True)


def test_files_that_cannot_be_used_are_2_and_named(says: Says, folder: Path, tmp_path: Path) -> None:
    ca, address, empty = ["--ca", str(folder / "ca.pem")], "localhost:1", tmp_path / "empty"
    empty.touch()
    missing = tmp_path / "missing"
    mistakes = {
        ("--ca", str(missing)): f"--ca: cannot read {missing}: No such file or directory",
        ("--ca", str(empty)): f"--ca: {empty} holds no usable PEM certificate",
        tuple(pair(folder)): "--cert and --key need --ca",
        (*ca, "--cert", str(folder / "health.pem")): "--cert and --key belong together",
        (*ca, "--cert", str(folder / "health.pem"), "--key", str(folder / "critic.key")): "are no PEM certificate and",
        ("--token-file", str(missing)): f"--token-file: cannot read {missing}",
        ("--token-file", str(empty)): f"--token-file: {empty} is empty, expected a token",
    }
    for arguments, expected in mistakes.items():
        code, line = says(address, *arguments)
        assert (code, expected in line) == (2, True), line


# As a process of its own, as probes start it.


def test_the_command_says_one_line_and_loads_little(start: Start) -> None:
    address = start(grpc_health.HealthServicer())
    command = [sys.executable, "-m", "splitppo.rpc.health", address, "--timeout", "60"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, f"{address}: SERVING\n", "")
    heavy = ("torch", "pydantic", "yaml", "numpy", "cryptography", "splitppo.config", "splitppo.v1")
    code = f"import sys, splitppo.rpc.health; print([name for name in {heavy} if name in sys.modules])"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert loaded.stdout == "[]\n"
