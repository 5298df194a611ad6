"""Starts real torchrun groups for tests, waits for them, and ends them by pid."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

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


class Group:
    """A torchrun group of `python -m MODULE --config FILE`.

    Args:
        module: e.g. "services.actor".
        config_file: YAML; its run.dir must be `run_dir`.
        role: name of the announcement, `<run_dir>/services/<role>.json`.
        overrides: key.path=value arguments.
        prefix: the words before the command, e.g. those that enter a network namespace.
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
        environment: dict[str, str] | None = None,
        prefix: Sequence[str] = (),
    ) -> None:
        self.run_dir, self.role = run_dir, role
        self.announcement = run_dir / "services" / f"{role}.json"
        self.announcement.unlink(missing_ok=True)
        self.output_file = run_dir / f"{role}_torchrun.out"
        run_dir.mkdir(parents=True, exist_ok=True)
        command = [
            *prefix,
            *(sys.executable, "-m", "services.runtime.group.torchrun", "--nproc-per-node", str(num_processes)),
            *("-m", module, "--config", str(config_file), *overrides),
        ]
        with self.output_file.open("wb") as output:
            self.process = subprocess.Popen(
                command + (["--lifeline"] if lifeline else []),
                cwd=PROJECT,
                stdin=subprocess.PIPE if lifeline else subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **(environment or {})},
                start_new_session=True,
            )

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
            os.killpg(self.process.pid, signal.SIGKILL)  # a session of its own: its ranks are in it
            self.process.wait()
        for pid in getattr(self, "pids", []):
            if is_alive(pid):
                os.kill(pid, signal.SIGKILL)
        if self.process.stdin is not None:
            self.process.stdin.close()
