"""A run on services that somebody else starts and restarts."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.certificates import TOKEN, expire, secure
from tests.groups import Group
from tests.runs import RunFolder, started

Completed = Callable[[str, int], RunFolder]


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


class ExternalServices:
    """Both groups, each at an address of its own, which a restart keeps. `services` changes that section."""

    def __init__(self, config: dict[str, Any], run_dir: Path, **services: Any) -> None:
        addresses = {role: free_address() for role in ("actor", "critic")}
        placement = {role: {"bind": address, "address": address} for role, address in addresses.items()}
        self.config = {**config, "services": {**config["services"], "launch": "external", **placement, **services}}
        self._run_dir = run_dir
        self._config_file = run_dir.with_suffix(".services.yaml")
        self._config_file.write_text(yaml.safe_dump({**self.config, "run": {**config["run"], "dir": str(run_dir)}}))
        self._groups = {role: self._start(role) for role in addresses}

    def wait_ready(self) -> None:
        for group in self._groups.values():
            group.wait_ready()

    def restart(self, role: str) -> None:
        self._groups[role].stop()
        self._groups[role] = self._start(role).wait_ready()

    def stop(self) -> None:
        for group in self._groups.values():
            group.stop()

    def _start(self, role: str) -> Group:
        return Group(f"services.{role}", self._config_file, self._run_dir, role)


@pytest.fixture
def services(config: dict[str, Any], tmp_path: Path) -> Iterator[ExternalServices]:
    services = ExternalServices(config, tmp_path / "run")
    try:
        services.wait_ready()
        yield services
    finally:
        services.stop()


def test_services_outlive_a_killed_controller_and_one_restarted_between_two_calls_is_restored(
    completed: Completed, services: ExternalServices, tmp_path: Path
) -> None:
    with started(services.config, tmp_path / "run") as first:
        first.wait_until(lambda folder: "ComputeLogProbs done" in folder.log("actor_0"), "log-probs of step 1")
        first.process.kill()
    with started(services.config, tmp_path / "run") as second:
        second.wait_until(lambda folder: 1 in folder.steps, "the line of step 1")
        os.kill(second.process.pid, signal.SIGSTOP)
        services.restart("critic")
        os.kill(second.process.pid, signal.SIGCONT)
        folder = second.complete()
    assert folder.summary["weights_sha256"] == completed("gather", 1).summary["weights_sha256"]


@pytest.fixture
def secured(config: dict[str, Any], tmp_path: Path) -> Iterator[ExternalServices]:
    """Behind mutual TLS and a token."""
    services = ExternalServices(config, tmp_path / "run", security=secure(tmp_path / "certs"))
    try:
        services.wait_ready()
        yield services
    finally:
        services.stop()


def test_a_run_over_mutual_tls_with_a_token_gives_the_same_weights_and_nobody_else_gets_in(
    completed: Completed, secured: ExternalServices, tmp_path: Path
) -> None:
    refused_in_one_sentence(secured, tmp_path)
    with started(secured.config, tmp_path / "run") as controller:
        folder = controller.complete()
    assert folder.summary["weights_sha256"] == completed("gather", 1).summary["weights_sha256"]
    written = [file for file in folder.path.rglob("*") if file.is_file()]
    assert [file for file in written if TOKEN.encode() in file.read_bytes()] == []
    assert TOKEN not in controller.output


def refused_in_one_sentence(services: ExternalServices, tmp_path: Path) -> None:
    """Other credentials end the controller with 2 before anything is done."""
    wrong_token = tmp_path / "wrong"
    wrong_token.write_text("not-the-token-of-these-services")
    strangers = secure(tmp_path / "strangers")
    security = services.config["services"]["security"]
    cases = {
        "wrong token: this service wants a bearer token": {**security, "token_file": str(wrong_token)},
        "is not trusted: its certificate is not accepted": {**strangers, "token_file": security["token_file"]},
        "is not signed by any authority": {**strangers, "ca_file": security["ca_file"]},
    }
    for sentence, changed in cases.items():
        config = {**services.config, "services": {**services.config["services"], "security": changed}}
        with started(config, tmp_path / "run") as controller:
            assert controller.wait() == 2, controller.output
        assert sentence in controller.output
        assert "Traceback" not in controller.output


def test_a_controller_with_an_expired_certificate_says_so_at_start(config: dict[str, Any], tmp_path: Path) -> None:
    security = secure(tmp_path / "certs")
    expire(tmp_path / "certs", "controller")
    with started({**config, "services": {"security": security}}, tmp_path / "run") as controller:
        assert controller.wait() == 2
    assert f"the certificate in {tmp_path / 'certs' / 'controller.pem'} has expired" in controller.output
    assert "Traceback" not in controller.output
