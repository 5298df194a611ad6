"""Writes `live.json`: what a run is doing now, for readers who must not ask its workers or its controller."""

import json
import os
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from splitppo.plain_file import open_plain

LIVE_FILE = "live.json"
_MIN_PAUSE_S = 0.5
_HEARTBEAT_S = 5.0
IDLE = {"method": "", "phase": None, "done": 0, "total": 0}
_UNKNOWN = {**IDLE, "state": None, "queue": None, "committed_step": None}


class LiveFile:
    """The content of live.json. Its methods are called in the event loop, `write_if_due` in the thread that records."""

    def __init__(self, folder: Path, *, run_id: str, epoch: int) -> None:
        self._path = folder / LIVE_FILE
        started = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]
        self._head: dict[str, Any] = {"run_id": run_id, "epoch": epoch, "host": os.uname().nodename}
        self._head |= {"pid": os.getpid(), "pid_started": int(started)}
        self._state: Mapping[str, Any] = {"step": 0, "total_steps": 0, "phase": "preparing"}
        self._pools: Mapping[str, Mapping[str, Any]] = {}
        self._written: Mapping[str, Any] = {}
        self._written_s = 0.0

    @property
    def step(self) -> int:
        """The step that runs now, or the last one."""
        return int(self._state["step"])

    def set(self, **state: Any) -> None:
        """Sets step, total_steps or phase ("preparing", "training", "recovering", "closing" or "ended")."""
        self._state = {**self._state, **state}

    def set_pool(self, role: str, **fields: Any) -> None:
        """Sets what a worker group does, or the state that it has told; `since_s` is when its method or phase began."""
        old = self._pools.get(role, {**_UNKNOWN, "since_s": time.time()})
        new = {**old, **fields}
        if (old["method"], old["phase"]) != (new["method"], new["phase"]):
            new["since_s"] = time.time()
        self._pools = {**self._pools, role: new}

    def idle(self, lost: str) -> None:
        """Says that a group is lost, and that the others work no more until the run goes on."""
        for role in {*self._pools, lost}:
            self.set_pool(role, **(_UNKNOWN | {"state": "lost"} if role == lost else IDLE))

    def end(self) -> None:
        """Says that the run has ended, and that no group works any more."""
        self.set(phase="ended")
        for role in self._pools:
            self.set_pool(role, **_UNKNOWN)

    def write_if_due(self, *, at_once: bool = False) -> None:
        """Writes the file after a change, at most twice per second, and every 5 s; a disk that is full is no matter.

        The difference of times has no sign, because the clock may be set back.
        """
        now_s = time.time()
        content = {**self._head, **self._state, "pools": self._pools}
        pause_s = 0.0 if at_once else _MIN_PAUSE_S if content != self._written else _HEARTBEAT_S
        if abs(now_s - self._written_s) < pause_s:
            return
        self._written = content
        self._written_s = now_s
        temporary = self._path.with_name(f".{LIVE_FILE}.tmp")
        with suppress(OSError):
            with open_plain(temporary, "wb") as file:
                file.write(json.dumps({"unix_s": now_s, **content}).encode())
            temporary.replace(self._path)


def is_gone(live: dict[str, Any]) -> bool:
    """Returns True if the controller ran on this machine and does not any more; no lock is touched to know it.

    The pid may belong to another process by now, so the start of that process (field 22 of /proc/PID/stat) is compared,
    too. Without /proc nobody knows, and it does not count as gone.
    """
    if live.get("host") != socket.gethostname() or not isinstance(live.get("pid"), int):
        return False
    try:
        fields = Path(f"/proc/{live['pid']}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return Path("/proc/self").exists()
    return str(live.get("pid_started", fields[19])) != fields[19]
