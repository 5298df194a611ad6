"""The network between the controller and the services fails and comes back."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from splitppo.machine.children.tree import descendants
from tests.support.certificates import secure
from tests.support.groups import Group
from tests.support.hosts import Host, two_hosts
from tests.support.ports import listening
from tests.support.runs import RunFolder, started

pytestmark = pytest.mark.timeout(900)

PORTS = {"actor": 7001, "critic": 7002}


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    """The controller's, and that of the services."""
    with two_hosts() as both:
        yield both


# Says which of the ports it is given answer at the address that it is given.
KNOCK = """
import socket, sys
for port in sys.argv[2:]:
    with socket.socket() as knocking:
        knocking.settimeout(5)
        if knocking.connect_ex((sys.argv[1], int(port))) == 0:
            print(port)
"""


def open_ports(near: Host, far: Host, groups: Sequence[Group]) -> set[int]:
    """Those of all ports that the groups' processes listen on which answer a stranger on the other machine."""
    roots = [group.process.pid for group in groups]
    processes = [*roots, *(below.pid for root in roots for below in descendants(root))]
    ports = {address.rpartition(":")[2] for address in listening(processes)}
    assert len(ports) > len(PORTS), "each group has a store of its own"
    knock = [*near.inside, sys.executable, "-c", KNOCK, far.address, *sorted(ports)]
    answered = subprocess.run(knock, check=True, capture_output=True, text=True).stdout
    return {int(port) for port in answered.split()}


def on_network(config: dict[str, Any], host: Host, certificates: Path) -> dict[str, Any]:
    """One rank per role, started by somebody else, at the far end of the cable; plaintext would stay on loopback."""
    places = {
        role: {"bind": f"{host.address}:{port}", "address": f"{host.address}:{port}"} for role, port in PORTS.items()
    }
    security = secure(certificates, (host.address,))
    return {**config, "services": {**config["services"], "launch": "external", "security": security, **places}}


@pytest.mark.extended
def test_a_run_survives_a_network_that_goes_away_and_comes_back(
    completed: Callable[[str, int], RunFolder], config: dict[str, Any], hosts: tuple[Host, Host], tmp_path: Path
) -> None:
    here, there = hosts
    undisturbed = completed("gather", 1).summary["weights_sha256"]
    far, run_dir = on_network(config, there, tmp_path / "certificates"), tmp_path / "run"
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
                    prefix=there.inside,
                )
            )
            cleanup.callback(groups[-1].stop)
        instances = [group.wait_ready().instance_id for group in groups]
        assert open_ports(here, there, groups) == set(PORTS.values()), "nothing but the services hears the other one"
        controller = cleanup.enter_context(started(far, run_dir, prefix=here.inside))
        controller.wait_until(lambda folder: 1 in folder.steps, "the line of step 1")
        here.cable("down")
        controller.wait_until(lambda folder: "recovering in" in folder.log("controller_0"), "a named error")
        here.cable("up")
        folder = controller.complete()
    assert "rank 0, step " in next(line for line in folder.log("controller_0").splitlines() if "recovering in" in line)
    assert folder.summary["weights_sha256"] == undisturbed
    assert {process["instance_id"] for process in folder.processes if process["instance_id"]} == set(instances), (
        "nobody restarted"
    )
