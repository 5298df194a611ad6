"""An actor group on two hosts, started by deploy/hosts: mutual TLS, a host whose ranks are killed, a pulled cable."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from splitppo.machine.children.tree import descendants
from splitppo.manifest import read_manifest
from tests.support.certificates import secure
from tests.support.groups import ONE_THREAD, PROJECT, is_alive, wait_until
from tests.support.hosts import ANY_PORT, Host, two_hosts
from tests.support.runs import Controller, RunFolder, started

pytestmark = pytest.mark.timeout(900)

UNIT = PROJECT / "deploy" / "hosts" / "splitppo@.service"
MASTER_PORT = 29500
PORTS = {"actor": 7001, "critic": 7002, "rollout": 7004}
CUT_S = 20.0
LAST_OF_SHORT = 4  # of the gate's form; the undisturbed run has a checkpoint there


def exec_start(role: str, arguments: str) -> list[str]:
    """Returns the command that systemd would run for an instance of the unit."""
    [line] = [line for line in UNIT.read_text().splitlines() if line.startswith("ExecStart=")]
    command = line.removeprefix("ExecStart=").replace("/opt/splitppo", str(PROJECT)).replace("%i", role)
    return command.replace("$ARGUMENTS", arguments).split()


class Supervisor:
    """deploy/hosts' supervisor of a group's ranks on one host."""

    def __init__(self, host: Host, role: str, config_file: Path, node_rank: int | None = None) -> None:
        numbered = "" if node_rank is None else f" --node-rank {node_rank}"
        arguments = f"--config {config_file}{numbered} {' '.join(ONE_THREAD)}"
        self.output_file = config_file.with_name(f"{role}_on_{host.name}.out")
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        with self.output_file.open("wb") as output:
            self.process = subprocess.Popen(
                [*host.inside, *exec_start(role, arguments)],
                cwd=PROJECT,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PATH": path},
                start_new_session=True,
            )

    @property
    def output(self) -> str:
        return self.output_file.read_text(errors="replace")

    @property
    def torchrun(self) -> int:
        """The pid of torchrun, which is the only child."""
        [torchrun] = [below.pid for below in descendants(self.process.pid) if below.ppid() == self.process.pid]
        return torchrun

    def stop(self) -> None:
        """Ends all that is left, at once."""
        left = [self.process.pid, *(below.pid for below in descendants(self.process.pid))]
        for pid in left:
            if is_alive(pid):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


@dataclass
class Rehearsal:
    """A run on two hosts: the actor has a rank on each, the critic is on the second, the controller on the first."""

    one: Host
    two: Host
    controller: Controller
    supervisors: dict[str, Supervisor] = field(default_factory=dict)

    def after_step(self, step: int) -> None:
        self.controller.wait_until(lambda folder: step in folder.steps, f"the line of step {step}")

    def kill_torchrun(self, name: str) -> None:
        """SIGKILL to a host's torchrun; its ranks see that by themselves.

        The controller stands still until they have ended, so that no run is over before.
        """
        torchrun = self.supervisors[name].torchrun
        ranks = [below.pid for below in descendants(torchrun)]
        self.controller.signal(signal.SIGSTOP)
        os.kill(torchrun, signal.SIGKILL)
        wait_until(lambda: not any(map(is_alive, ranks)), what=f"the end of the ranks of {name}")
        self.controller.signal(signal.SIGCONT)

    def check_ports(self) -> None:
        """Nothing listens but what docs/hosts.md's table has."""
        own = {self.one: {7001, MASTER_PORT}, self.two: {7002}}
        for host, ports in own.items():
            outside = {place for place in host.listening() if not place[0].startswith("127.")}
            assert {address for address, _ in outside} == {host.address}, outside
            assert {port for _, port in outside if port not in ANY_PORT} == ports, outside


@contextlib.contextmanager
def rehearsal(
    hosts: tuple[Host, Host], config: dict[str, Any], folder: Path, *overrides: str, samplers: int = 0
) -> Iterator[Rehearsal]:
    """Runs on two hosts; with `samplers` ranks of a rollout group, on the second."""
    one, two = hosts
    with contextlib.ExitStack() as cleanup:
        run_dir = folder / "run"
        services = {
            **config["services"],
            "launch": "external",
            "security": secure(folder / "certificates", ("one", "two")),
            "actor": {
                **config["services"]["actor"],
                "nnodes": 2,
                "master_addr": "one",
                "master_port": MASTER_PORT,
                "bind": f"{one.address}:{PORTS['actor']}",
                "address": f"one:{PORTS['actor']}",
            },
            "critic": {"bind": f"{two.address}:{PORTS['critic']}", "address": f"two:{PORTS['critic']}"},
        }
        if samplers:
            place = {"bind": f"{two.address}:{PORTS['rollout']}", "address": f"two:{PORTS['rollout']}"}
            services["rollout"] = {**place, "num_processes": samplers, "threads": 1}
        far = {**config, "services": services}
        file = folder / "services.yaml"
        file.write_text(yaml.safe_dump({**far, "run": {**far["run"], "dir": str(run_dir)}}))
        supervisors = {}
        for name, host, role, node_rank in (
            ("actor on two", two, "actor", 1),
            ("actor on one", one, "actor", 0),
            ("critic", two, "critic", None),
            *([("rollout", two, "rollout", None)] if samplers else []),
        ):
            supervisors[name] = Supervisor(host, role, file, node_rank)
            cleanup.callback(supervisors[name].stop)
        controller = cleanup.enter_context(started(far, run_dir, *overrides, prefix=one.inside))
        yield Rehearsal(one, two, controller, supervisors)


@pytest.fixture(scope="module")
def hosts() -> Iterator[tuple[Host, Host]]:
    with two_hosts() as both:
        yield both


@pytest.fixture
def actor_file(tmp_path: Path) -> Path:
    """An actor on two hosts, that nobody will start."""
    actor = {"nnodes": 2, "num_processes": 2, "master_addr": "one"}
    tree = {
        "run": {"dir": str(tmp_path / "run"), "total_steps": 1},
        "data": {"train_files": "unused", "train_batch_size": 4},
        "actor": {"model": "some/model"},
        "services": {"launch": "external", "actor": actor},
    }
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(tree))
    return file


def instances(folder: RunFolder, role: str) -> set[str]:
    """Returns the instance ids of the processes of a role's group."""
    return {process["instance_id"] for process in folder.processes if process["role"] == role}


@pytest.mark.parametrize(
    ("node_rank", "overrides", "sentence"),
    [
        (
            "0",
            [],
            "services.actor.master_addr 'one' is 10.213.47.1, and two, where node rank 0 is started, is",
        ),
        ("1", ["services.actor.master_addr=me"], "services.actor.master_addr 'me' is 127.0.1.1 on two, which no other"),
        ("1", ["services.actor.socket_ifname=eth7"], "services.actor.socket_ifname is 'eth7', but two has lo, cable"),
    ],
)
def test_what_is_wrong_with_a_hosts_network_is_one_sentence(
    hosts: tuple[Host, Host], actor_file: Path, node_rank: str, overrides: list[str], sentence: str
) -> None:
    _, two = hosts
    start = (sys.executable, "-m", "services.actor", "--config", str(actor_file), "--node-rank", node_rank, *overrides)
    ended = subprocess.run([*two.inside, *start], cwd=PROJECT, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2
    assert ended.stderr.startswith(f"error: {sentence}")
    assert ended.stderr.count("\n") == 1


def test_a_group_over_two_hosts_survives_the_death_of_its_ranks_on_one(
    hosts: tuple[Host, Host], completed: Callable[[str, int], RunFolder], two_ranks: dict[str, Any], tmp_path: Path
) -> None:
    undisturbed = completed("gather", 2).checkpoint(LAST_OF_SHORT)
    with rehearsal(hosts, two_ranks, tmp_path, f"run.stop_after_step={LAST_OF_SHORT}") as run:
        run.after_step(1)
        run.check_ports()
        run.after_step(2)
        run.kill_torchrun("actor on two")
        folder = run.controller.complete()
    said = next(line for line in folder.log("controller_0").splitlines() if "recovering in" in line)
    assert "rank 1 on two" in said
    expected = {role: read_manifest(undisturbed / role).weights_sha256 for role in ("actor", "critic")}
    assert folder.summary["weights_sha256"] == expected


@pytest.mark.extended
def test_a_rollout_group_on_the_second_host_gives_the_weights_of_a_run_without_and_is_all_that_its_death_costs(
    hosts: tuple[Host, Host], completed: Callable[[str, int], RunFolder], two_ranks: dict[str, Any], tmp_path: Path
) -> None:
    undisturbed = completed("gather", 2).summary["weights_sha256"]
    with rehearsal(hosts, two_ranks, tmp_path, samplers=2) as run:
        run.after_step(2)
        before = {role: instances(run.controller.folder, role) for role in PORTS}
        run.kill_torchrun("rollout")
        run.after_step(6)
        after = {role: instances(run.controller.folder, role) for role in PORTS}
        folder = run.controller.complete()
    assert [role for role in PORTS if after[role] != before[role]] == ["rollout"]
    assert folder.summary["weights_sha256"] == undisturbed


@pytest.mark.extended
def test_a_run_on_two_hosts_survives_a_cut_of_20_s_and_the_end_of_either_hosts_ranks(
    hosts: tuple[Host, Host], completed: Callable[[str, int], RunFolder], two_ranks: dict[str, Any], tmp_path: Path
) -> None:
    """Whichever supervisor is first to start its ranks again; the last time the far one waits for the near one."""
    undisturbed = completed("gather", 2).summary["weights_sha256"]
    with rehearsal(hosts, two_ranks, tmp_path) as run:
        run.after_step(1)
        before = instances(run.controller.folder, "actor")
        run.one.cable("down")
        time.sleep(CUT_S)  # the fact itself: so long they hear nothing of each other
        run.one.cable("up")
        run.after_step(4)
        assert instances(run.controller.folder, "actor") == before, "nobody was started again"
        run.kill_torchrun("actor on one")
        run.after_step(7)
        run.kill_torchrun("actor on two")
        run.after_step(10)
        os.kill(run.supervisors["actor on one"].process.pid, signal.SIGSTOP)
        run.kill_torchrun("actor on one")
        again = "start again"
        heard = run.supervisors["actor on two"].output.count(again)
        wait_until(lambda: run.supervisors["actor on two"].output.count(again) > heard, 60.0, "host two starts again")
        os.kill(run.supervisors["actor on one"].process.pid, signal.SIGCONT)
        folder = run.controller.complete()
    said = [line for line in folder.log("controller_0").splitlines() if "recovering in" in line]
    assert ["rank 1 on two failed: torchrun" in line for line in said] == [False, True, False]
    assert ["torchrun has ended; the group ends" in line for line in said] == [True, False, True]
    assert folder.summary["weights_sha256"] == undisturbed
