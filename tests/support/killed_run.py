"""A run folder as if processes of it had been killed: its events, the counters of its metrics, and its logs."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from tests.support.viewed_runs import Shape, make_run

BEGAN_S = 1_790_000_000.0
CAUSES = {
    "actor": "actor rank 1, step 4, Generate: a peer rank died: rank 1, pid 11; the group ends",
    "rollout": "rollout rank 0: the group has ended",
    "critic": "critic rank 0, step 6, Update (update): killed <b>by</b> the kernel",
}
# The losses in their order: (role, rank, seconds lost, complete steps done again); None: with the one before.
KILLS: list[tuple[str, int | None, float | None, int | None]] = [
    ("actor", 1, 8.5, 1),
    ("rollout", 0, 3.5, 0),
    ("critic", 0, 12.0, 2),
    ("actor", None, None, None),
    ("controller", None, 23.0, 1),
    ("critic", 0, 6.0, 1),
]
# What the two starts of the controller count: restarts, steps done again.
COUNTED = [(3, 3), (1, 1)]


class _Events:
    """Appends events a second after each other."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "events.jsonl"
        self._file.write_text("")
        self.now, self.epoch, self.step = BEGAN_S, 1, 0

    def add(self, kind: str, *, after: float = 1.0, **fields: Any) -> None:
        self.now += after
        with self._file.open("a") as file:
            head = {"unix_s": self.now, "epoch": self.epoch, "step": self.step, "kind": kind}
            file.write(json.dumps(head | fields) + "\n")

    def begin(self, epoch: int, resumed_at: int, *, after: float = 1.0) -> None:
        self.epoch, self.step = epoch, resumed_at
        self.add("start", after=after, resumed_at=resumed_at, pid=100 + epoch, host="here", version="0", changes=[])
        for role in ("actor", "critic", "rollout"):
            self.up(role)

    def up(self, role: str) -> None:
        self.add("group_up", role=role, instance_id=f"{role}{self.now:.0f}", pids=[10, 11], host="here")

    def steps(self, *steps: int) -> None:
        for self.step in steps:
            self.add("step", seconds=1.0, score=0.5)
        self.step += 1

    def lose(self, role: str, rank: int | None, *, method: str | None = None) -> None:
        self.add("group_lost", role=role, rank=rank, method=method, phase=None, cause=CAUSES[role])

    def recover(self, to_step: int, seconds: float, repeated: int, restarted: list[str], kept: list[str]) -> None:
        for role in restarted:
            self.up(role)
        steps = {"from_step": self.step, "to_step": to_step}
        self.add("recovery", **steps, restarted=restarted, kept=kept, pause_s=1)
        self.add("recovered", **steps, repeated_steps=repeated, seconds=seconds)


def make_killed_run(folder: Path) -> Path:
    """Writes a run of eight steps in which groups and once the controller were lost, as KILLS says."""
    make_run(folder, Shape(steps=8))
    events = _Events(folder)
    events.begin(1, 0)
    events.steps(1, 2, 3)
    events.lose("actor", 1, method="Generate")
    events.recover(2, 8.5, 1, ["actor"], ["critic", "rollout"])
    events.steps(3, 4)
    events.add("validation", accuracy=0.5, seconds=0.5)
    events.add("checkpoint", seconds=0.5)
    events.steps(5)
    events.lose("rollout", 0)
    events.up("rollout")
    events.add("rollout_restart", cause=CAUSES["rollout"], seconds=3.5)
    events.steps(6)
    events.lose("critic", 0, method="Update")
    events.lose("actor", None)
    events.recover(4, 12.0, 2, ["critic", "actor"], ["rollout"])
    events.steps(5, 6)
    events.begin(2, 5, after=20.0)
    events.steps(6, 7)
    events.lose("critic", 0)
    events.recover(6, 6.0, 1, ["critic"], ["actor", "rollout"])
    events.steps(7, 8)
    events.add("end", reason="completed", exit_status=0, record_cpu_s=0.1)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        restarts, repeated = COUNTED[0] if line["step"] <= 5 else COUNTED[1]
        line |= {"recovery/num_restarts": restarts, "recovery/num_repeated_steps": repeated}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "logs").mkdir()
    write_log(folder / "logs" / "controller_0.log", "controller.session", BEGAN_S, events.now)
    for role in ("actor", "critic", "rollout"):
        write_log(folder / "logs" / f"{role}_0.log", f"{role} rank 0", BEGAN_S, events.now)
    return folder


def write_log(file: Path, place: str, first_s: float, last_s: float) -> None:
    """Writes a log with a line for every second."""
    with file.open("w") as log:
        for number in range(int(last_s - first_s) + 1):
            log.write(log_line(first_s + number, f"{place}: line {number}"))


def log_line(unix_s: float, text: str) -> str:
    """A line as the formatters of controller and ranks make it, in local time."""
    local = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix_s))
    return f"{local},{int(unix_s * 1000) % 1000:03d} INFO {text}\n"
