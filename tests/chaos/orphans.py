"""python -m tests.chaos.orphans [--times N]: kills the controller at random moments; exit 1 if a process stays."""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from splitppo.machine.children.tree import descendants
from tests.kill_matrix.harness import matrix_config
from tests.support.groups import is_alive, wait_until
from tests.support.runs import RUN_TIMEOUT_S, Controller, Inputs

LIMIT_S = 5.0
MAX_DELAY_S = 40.0
_POLL_INTERVAL_S = 0.05


def kill_and_look(config: dict[str, Any], folder: Path, is_due: Callable[[Controller], bool]) -> tuple[int, list[str]]:
    """Kills a controller when it is due; returns how many processes it had, and those left after 5 s."""
    controller = Controller(config, folder)
    try:
        wait_until(lambda: controller.process.poll() is not None or is_due(controller), RUN_TIMEOUT_S, "the moment")
        known = {*(below.pid for below in descendants(controller.process.pid)), *controller.folder.rank_pids}
        known = {pid for pid in known if is_alive(pid)}
        controller.process.kill()
        controller.process.wait()
        deadline = time.monotonic() + LIMIT_S
        while (left := survivors(folder, known)) and time.monotonic() < deadline:
            time.sleep(_POLL_INTERVAL_S)
        return len(known), left
    finally:
        controller.stop()


def survivors(folder: Path, known: set[int]) -> list[str]:
    """Living processes that the controller had, or that name its run folder in their command line or environment."""
    named = {int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit() and _names(entry, folder)}
    return [f"{pid} {_read(Path(f'/proc/{pid}/cmdline'))[:200]}" for pid in sorted(known | named) if is_alive(pid)]


def _names(process: Path, folder: Path) -> bool:
    name = f"{folder}/"
    return name in _read(process / "cmdline") or name in _read(process / "environ")


def _read(file: Path) -> str:
    try:
        return file.read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def main() -> int:
    """Kills, looks, and starts the same run again."""
    parser = argparse.ArgumentParser(prog="tests.chaos.orphans", description=__doc__)
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    draws = random.Random(options.seed)
    num_failed = 0
    with tempfile.TemporaryDirectory("-orphans") as temporary:
        config = matrix_config(Inputs.make(Path(temporary) / "inputs"))
        config = {**config, "run": {"total_steps": 10_000}}
        for time_number in range(options.times):
            delay_s = draws.uniform(0.0, MAX_DELAY_S)
            due_at = time.monotonic() + delay_s
            num_known, left = kill_and_look(
                config, Path(temporary) / "run", lambda _, due_at=due_at: time.monotonic() >= due_at
            )
            num_failed += bool(left)
            words = f"LEFT: {'; '.join(left)}" if left else "nothing left"
            sys.stdout.write(
                f"{time_number + 1}: killed after {delay_s:.1f} s, it had {num_known} processes: {words}\n"
            )
            sys.stdout.flush()
    sys.stdout.write(f"{options.times - num_failed} of {options.times} left nothing within {LIMIT_S:g} s\n")
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
