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

from tests.groups import Group
from tests.runs import RunFolder, started

Completed = Callable[[str, int], RunFolder]


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


class ExternalServices:
    """Both groups, each at an address of its own, which a restart keeps."""

    def __init__(self, config: dict[str, Any], run_dir: Path) -> None:
        addresses = {role: free_address() for role in ("actor", "critic")}
        placement = {role: {"bind": address, "address": address} for role, address in addresses.items()}
        self.config = {**config, "services": {**config["services"], "launch": "external", **placement}}
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
