"""Measures how fast a worker answers health checks while its engine works: percentiles during Update and Generate.

    python -m benchmarks.health [--calls 200] [key.path=value ...]

It runs the quickstart's recipe in a temporary folder and asks both workers with a stock gRPC client and the run's
token. A call counts for the command that the worker's status names before and after it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from recipes.sort_letters.prepare import prepare
from splitppo.rpc.bearer_tokens import BearerTokens
from splitppo.rpc.credentials import Credentials
from splitppo.v1 import worker_pb2, worker_pb2_grpc

RECIPE = Path("recipes/sort_letters/cpu.yaml")
# More tokens than the quickstart has, so that commands last long enough to be asked in; enough steps for all calls.
SETTINGS = ("data.train_batch_size=1024", "run.total_steps=1000", "checkpoint.save_freq=-1", "evaluation.test_freq=-1")
COMMANDS = (("actor", "Generate"), ("actor", "Update"), ("critic", "Update"))
TIMEOUT_S = 300.0


class Worker:
    """A worker that is asked for its health and for its current command."""

    def __init__(self, address: str, tokens: BearerTokens) -> None:
        channel = Credentials(tokens=tokens).channel(address, grpc)
        self._health = health_pb2_grpc.HealthStub(channel)
        self._worker = worker_pb2_grpc.WorkerServiceStub(channel)  # type: ignore[no-untyped-call]

    def running(self) -> str:
        """The command that the engine works on, empty if there is none."""
        method: str = self._worker.GetStatus(worker_pb2.GetStatusRequest(), timeout=10).running_method
        return method

    def check_ms(self) -> float:
        """Returns the milliseconds of one health check."""
        started_s = time.perf_counter()
        self._health.Check(health_pb2.HealthCheckRequest(), timeout=10)
        return (time.perf_counter() - started_s) * 1e3


def addresses(run_dir: Path, controller: subprocess.Popen[bytes]) -> dict[str, str]:
    """Returns the addresses of both workers, as soon as processes.json has them."""
    file = run_dir / "processes.json"
    while not file.exists():
        if controller.poll() is not None:
            raise SystemExit("the run ended before its workers answered")
        time.sleep(0.1)
    rows: list[dict[str, Any]] = json.loads(file.read_text())
    return {row["role"]: row["address"] for row in rows if row["address"]}


def measure(run_dir: Path, controller: subprocess.Popen[bytes], num_calls: int) -> dict[tuple[str, str], list[float]]:
    """Returns `num_calls` times of each command, in milliseconds."""
    found = addresses(run_dir, controller)
    tokens = BearerTokens.parse((run_dir / "services" / "token").read_text(), "the run's token")
    workers = {role: Worker(address, tokens) for role, address in found.items()}
    times: dict[tuple[str, str], list[float]] = defaultdict(list)
    deadline = time.monotonic() + TIMEOUT_S
    while any(len(times[command]) < num_calls for command in COMMANDS):
        if time.monotonic() > deadline:
            raise SystemExit(f"not enough calls fell into commands within {TIMEOUT_S:g} s")
        for role, worker in workers.items():
            before = worker.running()
            elapsed_ms = worker.check_ms()
            after = worker.running()
            if before == after and len(times[role, before]) < num_calls:
                times[role, before].append(elapsed_ms)
    return times


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=200, help="health checks per command")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value")
    options = parser.parse_intermixed_args()
    prepare()
    with tempfile.TemporaryDirectory() as scratch:
        run_dir = Path(scratch) / "run"
        command = [sys.executable, "-m", "controller", "--config", str(RECIPE), *SETTINGS, *options.overrides]
        controller = subprocess.Popen([*command, f"run.dir={run_dir}"], stdout=subprocess.DEVNULL)
        try:
            times = measure(run_dir, controller, options.calls)
        finally:
            controller.terminate()
            controller.wait()
    print("| while running | calls | median ms | p99 ms | slowest ms |\n|---|---|---|---|---|")
    for role, method in COMMANDS:
        ms = sorted(times[role, method])
        p99 = ms[max(0, -(-99 * len(ms) // 100) - 1)]
        print(f"| {role} {method} | {len(ms)} | {statistics.median(ms):.1f} | {p99:.1f} | {ms[-1]:.1f} |")


if __name__ == "__main__":
    main()
