"""Access to a real service with mutual TLS and a token."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from splitppo.rpc.bearer_tokens import BearerTokens
from splitppo.rpc.certificates import Identity, load_identity
from splitppo.rpc.channel_options import CLIENT_OPTIONS
from splitppo.rpc.credentials import PLAINTEXT, Credentials, load_credentials
from splitppo.rpc.errors import Unauthenticated, WireError
from splitppo.rpc.health import main as check_health
from splitppo.v1 import worker_pb2, worker_pb2_grpc
from tests.integration.runtime.client import Client, experience, result
from tests.integration.runtime.conftest import MODULE, StartToy, Toy, write_config
from tests.support.certificates import TOKEN, expire, postpone, secure
from tests.support.groups import PROJECT, wait_until
from tests.support.reflection import REFLECTION, list_services
from tools import certs

WRONG = "another-token-of-the-tests-0123456789"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("certs")


@pytest.fixture(scope="module")
def guarded(start_module_toy: StartToy, folder: Path) -> Toy:
    return start_module_toy(security=secure(folder))


@pytest.fixture(scope="module")
def credentials(guarded: Toy) -> Credentials:
    """The right ones."""
    return load_credentials(guarded.client.config.services.security, "controller")


@pytest.fixture
def ask(guarded: Toy) -> Iterator[Callable[[Credentials], Any]]:
    """Asks for the status with other credentials."""
    channels: list[Any] = []

    def status(credentials: Credentials) -> Any:
        channels.append(credentials.channel(guarded.group.address, grpc))
        stub: Any = worker_pb2_grpc.WorkerServiceStub(channels[-1])  # type: ignore[no-untyped-call]
        return stub.GetStatus(worker_pb2.GetStatusRequest(), timeout=20)

    yield status
    for channel in channels:
        channel.close()


def code_of(call: Callable[[], Any]) -> grpc.StatusCode:
    with pytest.raises(grpc.RpcError) as failed:
        call()
    code: grpc.StatusCode = failed.value.code()
    return code


def test_a_whole_step_works_over_tls_with_a_token(guarded: Toy) -> None:
    client = guarded.client
    client.put(experience(1), prompts=[[1], [2]], responses=[[1], [2]], returns=[[0.5], [0.5]])
    result(client.compute_values(experience(1), base_step=0))
    assert client.get(experience(1), "values")["values"].num_rows == 2
    assert result(client.update(1)).committed_step == 1


@pytest.mark.parametrize("tokens", [None, BearerTokens((WRONG,))], ids=["missing", "wrong"])
@pytest.mark.parametrize("call", ["unary", "streamed up", "streamed down", "command", *REFLECTION])
def test_without_the_token_no_method_is_reached(
    guarded: Toy, credentials: Credentials, tokens: BearerTokens | None, call: str
) -> None:
    before = guarded.client.status()
    stranger = Client(
        guarded.group.address, guarded.config_file, credentials=replace(credentials, tokens=tokens), epoch=99
    )
    slot = experience(before.committed_step + 1)
    calls: dict[str, Callable[[], Any]] = {
        "unary": stranger.handshake,
        "streamed up": lambda: stranger.put(slot, prompts=[[1]]),
        "streamed down": lambda: stranger.get(slot, "prompts"),
        "command": lambda: result(stranger.load(0, base_step=before.committed_step)),
    }
    if call in REFLECTION:
        assert code_of(lambda: list_services(stranger.channel, call)) == grpc.StatusCode.UNAUTHENTICATED
    else:
        with pytest.raises(Unauthenticated, match="wrong token" if tokens else "no token"):
            calls[call]()
    stranger.close()
    assert guarded.client.status() == before


def test_a_stranger_is_refused_before_it_sends_a_request(guarded: Toy, credentials: Credentials) -> None:
    """Else a call without a message would hold its place for as long as its caller likes."""
    silence = threading.Event()

    def nothing() -> Iterator[bytes]:
        silence.wait(30)
        yield from ()

    with credentials_without_token(credentials).channel(guarded.group.address, grpc) as channel:
        get_status = channel.stream_unary("/splitppo.v1.WorkerService/GetStatus")
        assert code_of(lambda: get_status(nothing(), timeout=20)) == grpc.StatusCode.UNAUTHENTICATED
        silence.set()


def test_health_is_open_to_whoever_has_a_certificate_and_nothing_else_is(guarded: Toy, folder: Path) -> None:
    identity = load_identity(folder / "ca.pem", folder / "health.pem", folder / "health.key")
    with Credentials(identity).channel(guarded.group.address, grpc) as channel:
        answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=20)
        worker: Any = worker_pb2_grpc.WorkerServiceStub(channel)  # type: ignore[no-untyped-call]
        code = code_of(lambda: worker.GetStatus(worker_pb2.GetStatusRequest(), timeout=20))
    assert (answer.status, code) == (health_pb2.HealthCheckResponse.SERVING, grpc.StatusCode.UNAUTHENTICATED)


def test_a_health_check_of_the_command_line_tells_who_gets_in(
    guarded: Toy, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    address = guarded.group.address
    files = {"--ca": "ca.pem", "--cert": "health.pem", "--key": "health.key"}
    pair = [argument for option, name in files.items() for argument in (option, str(folder / name))]
    assert check_health([address, *pair, "--timeout", "20"]) == 0
    assert check_health([address, "--timeout", "20"]) == 1
    assert check_health([address, *pair[:2], "--timeout", "20"]) == 1
    serving, *refused = capsys.readouterr().out.splitlines()
    assert serving == f"{address}: SERVING"
    assert all("it hangs up" in line for line in refused), refused


def credentials_without_token(credentials: Credentials) -> Credentials:
    return replace(credentials, tokens=None)


def test_plaintext_gets_nowhere(ask: Callable[[Credentials], Any], credentials: Credentials) -> None:
    assert code_of(lambda: ask(PLAINTEXT)) == grpc.StatusCode.UNAVAILABLE
    assert code_of(lambda: ask(replace(PLAINTEXT, tokens=credentials.tokens))) == grpc.StatusCode.UNAVAILABLE


def test_tls_without_a_client_certificate_gets_nowhere(guarded: Toy, folder: Path) -> None:
    only_ca = grpc.ssl_channel_credentials((folder / "ca.pem").read_bytes())
    with grpc.secure_channel(guarded.group.address, only_ca, options=list(CLIENT_OPTIONS)) as channel:
        stub: Any = worker_pb2_grpc.WorkerServiceStub(channel)  # type: ignore[no-untyped-call]
        metadata = BearerTokens((TOKEN,)).metadata
        call = lambda: stub.GetStatus(worker_pb2.GetStatusRequest(), metadata=metadata, timeout=20)  # noqa: E731
        assert code_of(call) == grpc.StatusCode.UNAVAILABLE


def test_certificates_that_are_not_a_clients_get_nowhere(
    ask: Callable[[Credentials], Any], credentials: Credentials, folder: Path, tmp_path: Path
) -> None:
    certs.write_all(tmp_path / "strangers", ["localhost"], days=90)
    certs.write_all(tmp_path / "ours", ["localhost"], days=90)
    for name in ("ca.pem", "ca.key"):
        (tmp_path / "ours" / name).write_bytes((folder / name).read_bytes())
    expire(tmp_path / "ours", "controller")
    ca = (folder / "ca.pem").read_bytes()
    bad = {
        "of another authority": tmp_path / "strangers" / "controller",
        "expired": tmp_path / "ours" / "controller",
        "a server's": folder / "critic",
    }
    for what, stem in bad.items():
        identity = Identity(ca, stem.with_suffix(".pem").read_bytes(), stem.with_suffix(".key").read_bytes())
        code = code_of(lambda identity=identity: ask(replace(credentials, identity=identity)))
        assert code == grpc.StatusCode.UNAVAILABLE, what


def test_a_service_of_another_authority_is_not_trusted(
    ask: Callable[[Credentials], Any], credentials: Credentials, tmp_path: Path
) -> None:
    certs.write_all(tmp_path, ["localhost"], days=90)
    files = (tmp_path / name for name in ("ca.pem", "controller.pem", "controller.key"))
    identity = Identity(*(file.read_bytes() for file in files))
    assert code_of(lambda: ask(replace(credentials, identity=identity))) == grpc.StatusCode.UNAVAILABLE


def test_refusals_are_logged_and_the_token_is_nowhere(guarded: Toy, credentials: Credentials) -> None:
    """Not even the wrong one: it may be the right one of another service."""
    stranger = Client(
        guarded.group.address, guarded.config_file, credentials=replace(credentials, tokens=BearerTokens((WRONG,)))
    )
    with pytest.raises(WireError):
        stranger.status()
    stranger.close()
    wait_until(lambda: "refused wrong token: ipv" in log_of(guarded), what="a line in the log")
    assert "/splitppo.v1.WorkerService/" in log_of(guarded)
    assert files_with(guarded.run_dir, TOKEN, WRONG) == []


def log_of(toy: Toy) -> str:
    return (toy.run_dir / "logs" / "critic_0.log").read_text()


def files_with(folder: Path, *secrets: str) -> list[str]:
    files = [file for file in folder.rglob("*") if file.is_file()]
    assert files
    return [str(file) for file in files if any(secret.encode() in file.read_bytes() for secret in secrets)]


# Refused at start.


def start(config_file: Path, *arguments: str) -> tuple[int, str]:
    """One rank, as torchrun would start it; (exit code, what it says)."""
    rank = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "OMP_NUM_THREADS": "1"}
    store = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    ended = subprocess.run(
        [sys.executable, "-m", MODULE, "--config", str(config_file), *arguments],
        cwd=PROJECT,
        env={**os.environ, **rank, **store},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    return ended.returncode, ended.stderr


@pytest.mark.parametrize("bind", ["0.0.0.0:0", "some.host:7001"])
def test_a_door_to_the_network_without_credentials_is_refused(tmp_path: Path, bind: str) -> None:
    config_file = write_config(tmp_path, critic={"bind": bind})
    code, said = start(config_file)
    assert (code, said.count("\n")) == (2, 1)
    assert f"services.critic.bind is '{bind}', which is not a loopback address" in said


@pytest.mark.parametrize("when", ["expired", pytest.param("not yet valid", marks=pytest.mark.extended)])
def test_a_certificate_out_of_its_time_is_refused_in_one_sentence(tmp_path: Path, when: str) -> None:
    config_file = write_config(tmp_path, security=secure(tmp_path / "certs"))
    (expire if when == "expired" else postpone)(tmp_path / "certs", "critic")
    for arguments in ((), ("--check",)):
        code, said = start(config_file, *arguments)
        assert (code, said.count("\n")) == (2, 1), said
        assert f"the certificate in {tmp_path / 'certs' / 'critic.pem'}" in said
        assert ("has expired" if when == "expired" else "is not valid yet") in said


def test_a_token_file_that_is_not_there_is_refused_in_one_sentence(tmp_path: Path) -> None:
    code, said = start(write_config(tmp_path, security={"token_file": str(tmp_path / "nowhere")}))
    assert (code, said.count("\n")) == (2, 1)
    assert f"services.security.token_file: cannot read {tmp_path / 'nowhere'}" in said


# Settings.


def test_what_is_open_can_be_closed(start_toy: StartToy, tmp_path: Path) -> None:
    token_file = tmp_path / "token"
    token_file.write_text(TOKEN)
    token_file.chmod(0o600)
    toy = start_toy(security={"token_file": str(token_file), "open_health": False, "reflection": False})
    check = health_pb2.HealthCheckRequest()
    assert health_pb2_grpc.HealthStub(toy.client.channel).Check(check, timeout=20).status == 1
    with PLAINTEXT.channel(toy.group.address, grpc) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        assert code_of(lambda: stub.Check(check, timeout=20)) == grpc.StatusCode.UNAUTHENTICATED
    for service in REFLECTION:
        assert code_of(lambda name=service: list_services(toy.client.channel, name)) == grpc.StatusCode.UNIMPLEMENTED


def test_a_worker_that_everybody_on_the_machine_can_drive_says_so(start_toy: StartToy) -> None:
    assert "any user of this machine can give orders to the critic" in log_of(start_toy())
