"""The network between the controller and the services goes away, and comes back."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from splitppo.process_tree import descendants
from tests.certificates import secure
from tests.groups import Group
from tests.ports import listening
from tests.runs import RunFolder, started

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

CONTROLLER_ADDRESS, SERVICES_ADDRESS = "10.213.47.1", "10.213.47.2"
PORTS = {"actor": 7001, "critic": 7002}


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


@dataclass(frozen=True)
class Network:
    """Two network namespaces with one cable between them."""

    controller: str
    services: str

    def inside(self, namespace: str) -> Sequence[str]:
        """What runs a command in a namespace."""
        return ("ip", "netns", "exec", namespace)

    def cable(self, state: str) -> None:
        """Pulls the cable ("down"), or puts it back ("up")."""
        ip("-n", self.controller, "link", "set", "cable", state)


@pytest.fixture
def network() -> Iterator[Network]:
    """Skips where namespaces cannot be made."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and the command ip")
    network = Network(f"splitppo-controller-{os.getpid()}", f"splitppo-services-{os.getpid()}")
    try:
        try:
            for namespace in (network.controller, network.services):
                ip("netns", "add", namespace)
                ip("-n", namespace, "link", "set", "lo", "up")
            ip(
                *("link", "add", "cable", "netns", network.controller),
                *("type", "veth", "peer", "name", "cable", "netns", network.services),
            )
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces cannot be made here: {error.stderr.strip()}")
        for namespace, address in ((network.controller, CONTROLLER_ADDRESS), (network.services, SERVICES_ADDRESS)):
            ip("-n", namespace, "address", "add", f"{address}/30", "dev", "cable")
            ip("-n", namespace, "link", "set", "cable", "up")
        yield network
    finally:
        for namespace in (network.controller, network.services):
            with contextlib.suppress(subprocess.CalledProcessError):
                ip("netns", "delete", namespace)


# Says which of the ports it is given answer at the address that it is given.
KNOCK = """
import socket, sys
for port in sys.argv[2:]:
    with socket.socket() as knocking:
        knocking.settimeout(5)
        if knocking.connect_ex((sys.argv[1], int(port))) == 0:
            print(port)
"""


def open_ports(network: Network, groups: Sequence[Group]) -> set[int]:
    """Those of all ports that the groups' processes listen on which answer a stranger on the other machine."""
    processes = [pid for group in groups for pid in (group.process.pid, *descendants(group.process.pid))]
    ports = {address.rpartition(":")[2] for address in listening(processes)}
    assert len(ports) > len(PORTS), "each group has a store of its own"
    knock = [*network.inside(network.controller), sys.executable, "-c", KNOCK, SERVICES_ADDRESS, *sorted(ports)]
    answered = subprocess.run(knock, check=True, capture_output=True, text=True).stdout
    return {int(port) for port in answered.split()}


def on_network(config: dict[str, Any], certificates: Path) -> dict[str, Any]:
    """One rank per role, started by somebody else, at the far end of the cable; plaintext would stay on loopback."""
    places = {
        role: {"bind": f"{SERVICES_ADDRESS}:{port}", "address": f"{SERVICES_ADDRESS}:{port}"}
        for role, port in PORTS.items()
    }
    security = secure(certificates, (SERVICES_ADDRESS,))
    return {**config, "services": {**config["services"], "launch": "external", "security": security, **places}}


def test_a_run_survives_a_network_that_goes_away_and_comes_back(
    completed: Callable[[str, int], RunFolder], config: dict[str, Any], network: Network, tmp_path: Path
) -> None:
    undisturbed = completed("gather", 1).summary["weights_sha256"]
    far, run_dir = on_network(config, tmp_path / "certificates"), tmp_path / "run"
    services_file = tmp_path / "services.yaml"
    services_file.write_text(yaml.safe_dump({**far, "run": {**far["run"], "dir": str(run_dir)}}))
    with contextlib.ExitStack() as cleanup:
        groups = []
        for role in PORTS:
            groups.append(
                Group(
                    f"services.{role}",
                    services_file,
                    run_dir,
                    role,
                    prefix=network.inside(network.services),
                )
            )
            cleanup.callback(groups[-1].stop)
        instances = [group.wait_ready().instance_id for group in groups]
        assert open_ports(network, groups) == set(PORTS.values()), "nothing but the services hears the other machine"
        controller = cleanup.enter_context(started(far, run_dir, prefix=network.inside(network.controller)))
        controller.wait_until(lambda folder: 1 in folder.steps, "the line of step 1")
        network.cable("down")
        controller.wait_until(lambda folder: "recovering in" in folder.log("controller_0"), "a named error")
        network.cable("up")
        folder = controller.complete()
    assert "rank 0, step " in next(line for line in folder.log("controller_0").splitlines() if "recovering in" in line)
    assert folder.summary["weights_sha256"] == undisturbed
    assert {one["instance_id"] for one in folder.processes if one["instance_id"]} == set(instances), "nobody restarted"
