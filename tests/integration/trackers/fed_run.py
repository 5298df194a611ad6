"""Run folders, written as a run writes them, and read by a real tracker process."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from controller.tracking.trackers.process import TrackerProcess
from splitppo.config import Config, dump_config
from splitppo.run_folder.step_file import METRICS_FILE, StepFile
from tests.support.fake_services import make_config
from tests.support.recorded import write_samples

SAMPLE_EVERY = 2
# The smallest PNG that image libraries open: one grey pixel.
PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000001000000010800000000"
    "3a7e9b550000000a49444154789c63680000008200811ed79d1d0000000049454e44ae426082"
)


class FedRun:
    """A run of a few steps; each `start` is a controller of its own."""

    def __init__(self, folder: Path, trackers: Sequence[str], *, python: Path | None = None, **tracking: Any) -> None:
        folder.mkdir(exist_ok=True)
        self.folder = folder
        self.id = secrets.token_hex(8)
        self.python = python
        # Long, so that no step is given up on a busy machine.
        changes = {f"tracking__{key}": value for key, value in {"flush_timeout_s": 120.0, **tracking}.items()}
        self.config: Config = make_config(
            folder,
            run__name="proof",
            tracking__project="proofs",
            tracking__trackers=list(trackers),
            tracking__python=None if python is None else str(python),
            **changes,
        )
        (folder / "config.yaml").write_text(dump_config(self.config))
        (folder / "controller.epoch").write_text(json.dumps({"run_id": self.id, "epoch": 1}))
        self.start(-1)

    def start(self, restored_step: int) -> TrackerProcess:
        """Opens the files, cut back, and starts the tracker process."""
        self.metrics = StepFile(self.folder / METRICS_FILE, restored_step)
        self.process = TrackerProcess(self.config, self.folder, self.id)
        return self.process

    def write(self, *steps: int, offset: float = 0.0) -> None:
        """Writes steps, with samples every few of them, and wakes the tracker process."""
        for step in steps:
            if step % SAMPLE_EVERY == 0:
                write_samples(self.folder, "train", step, ("letters", f"sort {step}|", "a\nb", "ab", 1.0))
            values = {"critic/score/mean": step / 8 + offset, "val-core/letters/acc/mean@1": 0.5, "inf": float("inf")}
            self.metrics.write(step, {**values, "training/global_step": float(step)})
            self.process.wake()

    def end(self, exit_reason: str = "completed") -> None:
        """Ends the run as the controller does: summary, report, then the trackers."""
        (self.folder / "summary.json").write_text(json.dumps({"exit_reason": exit_reason}))
        (self.folder / "report.png").write_bytes(PNG)
        self.process.finish()

    def sent_step(self, tracker: str) -> int:
        """The last step that stands in the tracker's file; -1 before there is one."""
        file = self.folder / "trackers" / f"{tracker}.json"
        return int(json.loads(file.read_text())["step"]) if file.exists() else -1

    def held_by(self, tracker: str) -> dict[str, Any]:
        """Returns the content of the tracker; see readers.py."""
        return held_by(tracker, self.folder, self.python)


def tracker_pids() -> list[int]:
    """Returns the pids of the tracker processes that this process has started."""
    return [int(entry.name) for entry in Path("/proc").iterdir() if _is_child(entry)]


def _is_child(entry: Path) -> bool:
    """Returns True for a tracker process that this process has started."""
    try:
        command, parent = (entry / "cmdline").read_bytes(), (entry / "stat").read_text().rpartition(")")[2].split()[1]
    except (OSError, ValueError):
        return False
    return b"controller.tracking.trackers" in command and int(parent) == os.getpid()


def held_by(tracker: str, folder: Path, python: Path | None = None) -> dict[str, Any]:
    """Returns the content of the run in `folder` in a tracker, read by `python`; see readers.py."""
    command = [str(python or sys.executable), str(Path(__file__).with_name("readers.py")), tracker, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    content: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return content


def scores(*steps: int, offset: float = 0.0) -> list[list[float]]:
    """Returns the content of a tracker after these steps were sent, each once."""
    return [[step, step / 8 + offset] for step in steps]
