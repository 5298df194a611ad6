"""A run in which processes are killed at random; the controller is started again when it is killed."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.kill_matrix.harness import matrix_config
from tests.support.groups import is_alive
from tests.support.runs import Controller, Inputs, started

# A kill waits for a new step, and a moment longer: for another two or three of a tiny model's.
STEPS_PER_KILL = 6
SPARE_STEPS = 2
STOPPED_SHARE = 0.15
# Share of the kills that do not wait for the recovery from the one before.
DOUBLE_SHARE = 0.15
MAX_DELAY_S = 0.6
MAX_DOUBLE_DELAY_S = 15.0
_POLL_INTERVAL_S = 0.05
_STUCK_S = 600.0


@dataclass
class Kill:
    """One of them.

    Attributes:
        victim: role and rank.
        action: "SIGKILL" or "SIGSTOP".
        step: the last one that was done before.
        at_s: unix seconds.
        recovery_s: until a step was done that had not been done before, or the run was; 0 while there is none.
    """

    victim: str
    action: str
    step: int
    at_s: float
    recovery_s: float = 0.0


def chaos_config(inputs: Inputs, num_kills: int) -> dict[str, Any]:
    """The run of the kill matrix, with steps for all kills, and patience enough for several kills in a row."""
    config = matrix_config(inputs, max_restarts=20, progress_timeout_s=30.0)
    return {
        **config,
        "run": {"total_steps": STEPS_PER_KILL * num_kills + SPARE_STEPS},
        "checkpoint": {"save_freq": 1, "keep": 2},
    }


def run_chaos(
    config: dict[str, Any],
    folder: Path,
    num_kills: int,
    draws: random.Random,
    kills: list[Kill],
    say: Callable[[str], None] = lambda _: None,
) -> dict[str, str]:
    """Runs to the end and returns the digests of the weights; the kills are added to `kills` as they happen."""
    chaos = _Chaos(num_kills, draws, kills, say)
    while True:
        with started(config, folder) as controller:
            chaos.rage_until_end(controller)
        if controller.process.returncode != -signal.SIGKILL:
            break
    digests: dict[str, str] = controller.complete().summary["weights_sha256"]
    chaos.note_end()
    return digests


class _Chaos:
    def __init__(self, num_kills: int, draws: random.Random, kills: list[Kill], say: Callable[[str], None]) -> None:
        self._num_kills = num_kills
        self._draws = draws
        self._kills = kills
        self._say = say
        self._last_step = 0
        self._is_recovering = False
        self._due_at = float("inf")
        self._changed_at = time.monotonic()

    def rage_until_end(self, controller: Controller) -> None:
        """Kills at the drawn moments, until the controller ends."""
        while controller.process.poll() is None:
            self._note_progress(controller)
            if time.monotonic() >= self._due_at:
                self._strike(controller)
            if time.monotonic() > self._changed_at + _STUCK_S:
                raise TimeoutError(f"no new step for {_STUCK_S:g} s:\n{controller.output}")
            time.sleep(_POLL_INTERVAL_S)
        self._note_progress(controller)

    def note_end(self) -> None:
        """The run is complete: it has recovered from whatever came last."""
        self._note_recoveries(self._last_step + 1)

    def _note_progress(self, controller: Controller) -> None:
        step = max(controller.folder.steps, default=0)
        if step <= self._last_step:
            return
        self._last_step, self._changed_at = step, time.monotonic()
        self._note_recoveries(step)
        if len(self._kills) < self._num_kills and self._due_at == float("inf"):
            self._due_at = time.monotonic() + self._draws.uniform(0.0, MAX_DELAY_S)

    def _note_recoveries(self, step: int) -> None:
        for kill in self._kills:
            if not kill.recovery_s and kill.step < step:
                kill.recovery_s = time.time() - kill.at_s
                self._say(f"  {kill.action} {kill.victim} after step {kill.step}: {kill.recovery_s:.1f} s")

    def _strike(self, controller: Controller) -> None:
        """Kills or stops one process that runs; the next strike may come before the recovery from this one."""
        alive = [process for process in controller.folder.processes if is_alive(process["pid"])]
        if not alive:
            return
        victim_process = self._draws.choice(alive)
        action = "SIGKILL"
        if victim_process["role"] != "controller" and self._draws.random() < STOPPED_SHARE:
            action = "SIGSTOP"
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim_process["pid"], getattr(signal, action))
            victim = f"{victim_process['role']} rank {victim_process['rank']}"
            self._kills.append(Kill(victim, action, self._last_step, time.time()))
        self._due_at = float("inf")
        if len(self._kills) < self._num_kills and self._draws.random() < DOUBLE_SHARE:
            self._due_at = time.monotonic() + self._draws.uniform(0.0, MAX_DOUBLE_DELAY_S)
