"""A Slurm cluster on this machine: every node has its own network, host name, processes and slurmd."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from tests.support.groups import wait_until

COMMANDS = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "scontrol", "squeue", "ip", "unshare", "nsenter")
NETWORK = "10.213.48"
TIMEOUT_S = 240.0
_POLL_INTERVAL_S = 0.2
CONFIGURATION = """
ClusterName={name}
SlurmctldHost={host}({network}.254)
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
CryptoType=crypto/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=0,sched_interval=1
SlurmdParameters=config_overrides
SlurmdTimeout=10
KillWait=30
MpiDefault=none
GresTypes=gpu
ReturnToService=2
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE
"""
# What a node does before it is one: its own host name, and names for all the others.
START = """
hostname {node}
mount --bind {folder}/hosts /etc/hosts
mount --bind /dev/null /etc/resolv.conf
slurmd -D -f {folder}/slurm.conf -N {node} &
wait $!
"""


def missing() -> str | None:
    """Why there can be no cluster here; None where there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    absent = [command for command in COMMANDS if shutil.which(command) is None]
    return f"not installed: {', '.join(absent)} (apt-get install slurm-wlm munge)" if absent else None


class Cluster:
    """Nodes called node1, node2, ..., one partition, one controller; all that it starts ends with it.

    Args:
        folder: for configuration, state and logs.
        num_nodes: machines.
        num_gpus: what each claims to have; there are none behind it.
    """

    def __init__(self, folder: Path, num_nodes: int, num_gpus: int = 0) -> None:
        self.folder = folder
        self.nodes = [f"node{number}" for number in range(1, num_nodes + 1)]
        self.name = f"splitppo{os.getpid()}"
        self._num_gpus = num_gpus
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> Cluster:
        """Returns when every node is idle."""
        for part in ("munge", "state", "spool"):
            (self.folder / part).mkdir(parents=True)
        for node in self.nodes:
            (self.folder / "spool" / node).mkdir()
        self.folder.joinpath("munge").chmod(0o711)
        hosts = {**{node: self._address(node) for node in self.nodes}, "localhost": "127.0.0.1"}
        self.folder.joinpath("hosts").write_text("".join(f"{address} {name}\n" for name, address in hosts.items()))
        gpus = f" Gres=gpu:{self._num_gpus}" if self._num_gpus else ""
        devices = [self.folder / f"gpu{number}" for number in range(self._num_gpus)]
        for device in devices:
            device.touch()
        self.folder.joinpath("gres.conf").write_text("".join(f"Name=gpu File={device}\n" for device in devices))
        lines = [
            f"NodeName={node} NodeAddr={self._address(node)} CPUs=4 RealMemory=4096{gpus} State=UNKNOWN"
            for node in self.nodes
        ]
        settings = {"name": self.name, "host": os.uname().nodename, "network": NETWORK, "folder": self.folder}
        self._conf.write_text(CONFIGURATION.format(**settings, nodes="\n".join(lines)))
        self._lay_cables()
        munge = self.folder / "munge"
        key = munge / "key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        own = (f"--{name}-file={munge / name}" for name in ("key", "pid", "seed", "log"))
        # Without --force it wants to be nobody but `munge`.
        self._run("munged", ["munged", "--foreground", "--force", f"--socket={munge / 'socket'}", *own])
        wait_until((munge / "socket").exists, 10.0, "munged")
        self._run("slurmctld", [*self._inside(self.name), "slurmctld", "-D", "-f", str(self._conf)])
        for node in self.nodes:
            self.switch_on(node)
        wait_until(lambda: self.states() == dict.fromkeys(self.nodes, "IDLE"), 60.0, "idle nodes")
        return self

    def switch_on(self, node: str) -> None:
        """Starts a node, which registers by itself."""
        script = START.format(node=node, folder=self.folder)
        private = ["unshare", "--mount", "--uts", "--pid", "--fork", "--mount-proc", "--kill-child"]
        self._run(node, [*self._inside(f"{self.name}-{node}"), *private, "bash", "-c", script])

    def switch_off(self, node: str) -> None:
        """Ends all that runs on a node, at once and without a word."""
        process = self._processes.pop(node)
        process.kill()
        process.wait()

    def on(self, node: str, *command: str, check: bool = True) -> str:
        """Runs a command as somebody who has logged in there; what it says on stdout."""
        (first,) = _children(self._processes[node].pid)
        entered = ["nsenter", "--target", str(first), "--net", "--uts", "--mount", "--pid"]
        environment = {**os.environ, "SLURM_CONF": str(self._conf)}
        done = subprocess.run([*entered, *command], capture_output=True, text=True, env=environment, timeout=TIMEOUT_S)
        assert not check or done.returncode == 0, f"{' '.join(command)}:\n{done.stdout}{done.stderr}"
        return done.stdout.strip() if check else done.stdout + done.stderr

    def states(self) -> dict[str, str]:
        """Returns the state of each node in Slurm."""
        with contextlib.suppress(AssertionError):
            lines = self._ask("sinfo", "--noheader", "--Node", "--format", "%N %T").splitlines()
            return {name: state.upper().rstrip("*") for name, state in map(str.split, lines)}
        return {}

    def job(self, job_id: str) -> dict[str, str]:
        """Returns the fields of `scontrol show job`."""
        words = self._ask("scontrol", "show", "job", job_id, "--oneliner").split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait_for_end(self, job_id: str) -> dict[str, str]:
        """Waits until a job has ended, for good; its fields."""
        ended = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"}
        deadline = time.monotonic() + TIMEOUT_S
        while (fields := self.job(job_id))["JobState"] not in ended:
            assert time.monotonic() < deadline, f"the job has not ended within {TIMEOUT_S} s: {fields}"
            time.sleep(_POLL_INTERVAL_S)
        return fields

    def log(self) -> str:
        """The last lines of the controller's log."""
        file = self.folder / "slurmctld.log"
        return "\n".join(file.read_text().splitlines()[-20:]) if file.exists() else ""

    def stop(self) -> None:
        """Ends and removes everything."""
        for name in reversed(list(self._processes)):
            with contextlib.suppress(ProcessLookupError):
                self._processes[name].send_signal(signal.SIGKILL)
            self._processes[name].wait()
        for namespace in (*(f"{self.name}-{node}" for node in self.nodes), self.name):
            subprocess.run(["ip", "netns", "delete", namespace], capture_output=True, check=False)

    @property
    def _conf(self) -> Path:
        return self.folder / "slurm.conf"

    def _address(self, node: str) -> str:
        return f"{NETWORK}.{node.removeprefix('node')}"

    def _inside(self, namespace: str) -> list[str]:
        return ["nsenter", f"--net=/run/netns/{namespace}"]

    def _ask(self, *command: str) -> str:
        environment = {**os.environ, "SLURM_CONF": str(self._conf)}
        inside = [*self._inside(self.name), *command]
        done = subprocess.run(inside, capture_output=True, text=True, env=environment, timeout=60.0)
        assert done.returncode == 0, f"{' '.join(command)}:\n{done.stderr}"
        return done.stdout.strip()

    def _run(self, name: str, command: list[str]) -> None:
        with (self.folder / f"{name}.out").open("ab") as output:
            self._processes[name] = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, "SLURM_CONF": str(self._conf)},
            )

    def _lay_cables(self) -> None:
        """A switch, in a namespace of its own so that no firewall of this machine counts, and a cable to every node."""
        switch = self.name
        _ip("netns", "add", switch)
        for arguments in (
            ("link", "set", "lo", "up"),
            ("link", "add", "switch", "type", "bridge"),
            ("address", "add", f"{NETWORK}.254/24", "dev", "switch"),
            ("link", "set", "switch", "up"),
        ):
            _ip("-n", switch, *arguments)
        for node in self.nodes:
            namespace = f"{self.name}-{node}"
            _ip("netns", "add", namespace)
            _ip("-n", namespace, "link", "set", "lo", "up")
            _ip("-n", switch, "link", "add", node, "type", "veth", "peer", "name", "eth0", "netns", namespace)
            _ip("-n", switch, "link", "set", node, "master", "switch", "up")
            _ip("-n", namespace, "address", "add", f"{self._address(node)}/24", "dev", "eth0")
            _ip("-n", namespace, "link", "set", "eth0", "up")


@contextlib.contextmanager
def started(folder: Path, num_nodes: int, num_gpus: int = 0) -> Iterator[Cluster]:
    """A cluster that is gone afterwards."""
    cluster = Cluster(folder, num_nodes, num_gpus)
    try:
        yield cluster.start()
    finally:
        cluster.stop()


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"ip {' '.join(arguments)}: {done.stderr}"


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
