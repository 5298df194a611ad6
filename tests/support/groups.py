"""Starts real torchrun groups for tests, waits for them, and ends them by pid.

They are forked from a template, as those of a controller are; each process of pytest has one. So a test need not wait
until torch and transformers are imported.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

from splitppo.machine.children.forks import Forked, ForkServer

START_TIMEOUT_S = 240.0
POLL_INTERVAL_S = 0.02
# Numbers on a CPU may depend on how many threads compute them: tests give the same ones on every machine.
ONE_THREAD = tuple(f"services.{role}.threads=1" for role in ("actor", "critic", "reward"))
PROJECT = Path(__file__).resolve().parents[2]


def wait_until(condition: Callable[[], Any], timeout_s: float = 30.0, what: str = "condition") -> Any:
    """Polls until `condition()` is true, and returns its value; TimeoutError after the deadline."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {timeout_s} s")
        time.sleep(POLL_INTERVAL_S)
    return value


def is_alive(pid: int) -> bool:
    """Returns True if a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except (FileNotFoundError, ProcessLookupError):
        return False


def _has_ended(pid: int) -> bool:
    return not is_alive(pid)


def free_address() -> str:
    """Returns an address on this machine with a free port.

    The kernel does not give this port to clients or to a process that binds port 0, so it stays free while its group is
    down.
    """
    first_handed_out = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.randrange(10_000, first_handed_out)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return f"127.0.0.1:{port}"


@cache
def template(pid: int) -> ForkServer:
    """Starts the template of this process's groups, which ends with it; `pid` is this process's."""
    command = (sys.executable, "-u", "-m", "services.runtime.group.template", "--config", "none")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    with tempfile.TemporaryFile() as output:
        return ForkServer((*command, "actor", "critic", "reward", "rollout"), environment, output)


class Group:
    """A torchrun group of `python -m MODULE --config FILE`.

    Args:
        module: e.g. "services.actor".
        config_file: YAML; its run.dir must be `run_dir`.
        role: name of the announcement, `<run_dir>/services/<role>.json`.
        overrides: key.path=value arguments.
        prefix: the words before the command, e.g. those that enter a network namespace. With them the group is started,
            not forked.

    Attributes:
        stdin: the writing end of the lifeline; None without one.
    """

    def __init__(
        self,
        module: str,
        config_file: Path,
        run_dir: Path,
        role: str,
        *,
        num_processes: int = 1,
        overrides: Sequence[str] = ONE_THREAD,
        lifeline: bool = False,
        prefix: Sequence[str] = (),
    ) -> None:
        self.run_dir, self.role = run_dir, role
        self.announcement = run_dir / "services" / f"{role}.json"
        self.announcement.unlink(missing_ok=True)
        self.output_file = run_dir / f"{role}_torchrun.out"
        run_dir.mkdir(parents=True, exist_ok=True)
        arguments = [
            *("--nproc-per-node", str(num_processes), "-m", module, "--config", str(config_file), *overrides),
            *(["--lifeline"] if lifeline else []),
        ]
        self.stdin: int | None = None
        if lifeline:
            stdin, self.stdin = os.pipe()
        else:
            stdin = os.open(os.devnull, os.O_RDONLY)
        with self.output_file.open("wb") as output:
            start = _start if prefix else _fork
            self.process = start(prefix, arguments, stdin, output.fileno())
        os.close(stdin)

    @property
    def output(self) -> str:
        """The output of torchrun and its ranks."""
        return self.output_file.read_text(errors="replace")

    def wait_ready(self) -> Group:
        """Waits until rank 0 takes calls."""

        def ready() -> bool:
            if self.process.poll() is not None:
                raise RuntimeError(f"the {self.role} group ended at start:\n{self.output}")
            return self.announcement.exists()

        wait_until(ready, START_TIMEOUT_S, f"{self.role} group ready")
        announced = json.loads(self.announcement.read_text())
        self.address: str = announced["address"]
        self.port = int(self.address.rpartition(":")[2])
        self.instance_id: str = announced["instance_id"]
        self.pids: list[int] = [process["pid"] for process in announced["processes"]]
        return self

    def kill_rank(self, rank: int) -> None:
        """Sends SIGKILL to a rank."""
        os.kill(self.pids[rank], signal.SIGKILL)

    def wait_ended(self, timeout_s: float = 60.0) -> int:
        """Waits until torchrun and every rank have ended; returns the exit code of torchrun."""
        code = self.process.wait(timeout_s)
        for pid in getattr(self, "pids", []):
            wait_until(partial(_has_ended, pid), 5.0, f"rank with pid {pid} ends")
        return code

    def stop(self) -> None:
        """Ends at once all processes that still run."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for pid in getattr(self, "pids", []):
            if is_alive(pid):
                os.kill(pid, signal.SIGKILL)
        self.cut_lifeline()

    def cut_lifeline(self) -> None:
        """Ends the standard input of the group, as the end of its launcher does."""
        if self.stdin is not None:
            os.close(self.stdin)
            self.stdin = None


def _fork(prefix: Sequence[str], arguments: Sequence[str], stdin: int, output: int) -> Forked:
    """Has a torchrun forked, and waits until it is there: a test may kill it by its pid."""
    request = {"arguments": arguments, "environment": {**os.environ, "CUDA_VISIBLE_DEVICES": ""}, "report_file": None}
    forked = template(os.getpid()).fork(request, stdin, output)
    wait_until(lambda: forked.pid or forked.poll() is not None, START_TIMEOUT_S, "torchrun is forked")
    return forked


def _start(prefix: Sequence[str], arguments: Sequence[str], stdin: int, output: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [*prefix, sys.executable, "-m", "services.runtime.group.torchrun", *arguments],
        cwd=PROJECT,
        stdin=stdin,
        stdout=output,
        stderr=output,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        start_new_session=True,
    )
