"""Failpoints: named points in the code at which a test makes a process die, stop, fail or wait.

docs/adr/015-failpoints.md gives the reasons.

Code calls `hit` at a point; without failpoints (`arm`) the call does nothing. A failpoint fires once in a run folder:
its mark, `failpoints/<point>....fired`, is written before the process dies. A process that was started again therefore
passes the point unharmed, and a test can read when and in which process the failpoint fired. If the mark is gone,
because the folder contains another run now, the failpoint may fire again.
"""

import json
import os
import re
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from splitppo.config.sections.debug import DebugConfig, Failpoint, Moment

FOLDER = "failpoints"
_WAIT_TIMEOUT_S = 120.0
_POLL_INTERVAL_S = 0.01


class FailpointError(RuntimeError):
    """The exception that a failpoint with action `raise` raises."""


class Failpoints:
    """The failpoints of one process (actor, critic or controller), and how often the process has passed each one."""

    def __init__(self, config: DebugConfig, run_dir: Path, process: str, rank: int = 0) -> None:
        self._config = config.failpoints
        self._folder = run_dir / FOLDER
        self._process = process
        self._rank = rank
        awaited = [failpoint.after for several in self._config.values() for failpoint in several]
        self._awaited = {(moment.point, moment.step) for moment in awaited if moment is not None}
        self._num_hits: Counter[tuple[str, Failpoint]] = Counter()
        self.step = -1

    def hit(self, point: str, step: int | None = None) -> None:
        """Reports that this process passes a named point in its work on a step; does the action of a failpoint there.

        Raises:
            FailpointError, MemoryError: the action of the failpoint.
            TimeoutError: the point that it waits for is not passed.
        """
        name = f"{self._process}.{point}"
        step = self.step if step is None else step
        if (name, step) in self._awaited:
            self._mark(passed_mark(name, step), "passed", step)
        for failpoint in self._config.get(name, ()):
            if failpoint.rank == self._rank and failpoint.step in (None, step):
                self._num_hits[name, failpoint] += 1
                if self._num_hits[name, failpoint] >= failpoint.hit:
                    self._fire(name, failpoint, step)

    def _fire(self, name: str, failpoint: Failpoint, step: int) -> None:
        """Does the action of a failpoint, unless its mark says that it has fired: the mark is made before the action.

        A failpoint with `after` waits for that moment before. Of processes that come here together one makes the mark.
        """
        mark = fired_mark(name, failpoint)
        if (self._folder / mark).exists():
            return
        if failpoint.after is not None:
            self._wait_for(failpoint.after)
        if not self._mark(mark, failpoint.action, step):
            return
        match failpoint.action:  # nothing is left to do for "wait"
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "raise":
                raise FailpointError(f"failpoint {name} has fired")
            case "out_of_memory":
                raise MemoryError(f"failpoint {name} has fired")

    def _wait_for(self, moment: Moment) -> None:
        """Waits until another process has passed a point; TimeoutError if that takes too long."""
        mark = self._folder / passed_mark(moment.point, moment.step)
        deadline = time.monotonic() + _WAIT_TIMEOUT_S
        while not mark.exists():
            if time.monotonic() > deadline:
                raise TimeoutError(f"nobody has passed {moment.point} in step {moment.step}")
            time.sleep(_POLL_INTERVAL_S)

    def _mark(self, name: str, what: str, step: int) -> bool:
        """Writes a JSON file `name` into the folder of failpoint marks; returns False if the file exists already."""
        self._folder.mkdir(parents=True, exist_ok=True)
        content = {"pid": os.getpid(), "rank": self._rank, "step": step, "what": what, "unix_s": time.time()}
        part = self._folder / f".{name}.{os.getpid()}"
        part.write_text(json.dumps(content), encoding="utf-8")
        try:
            os.link(part, self._folder / name)
        except FileExistsError:
            return False
        finally:
            part.unlink()
        return True


def fired_mark(point: str, failpoint: Failpoint) -> str:
    """Returns the name of the file that records that a failpoint has done its action."""
    step = "any" if failpoint.step is None else failpoint.step
    return f"{point}.rank{failpoint.rank}.step{step}.hit{failpoint.hit}.{failpoint.action}.fired"


def passed_mark(point: str, step: int) -> str:
    """Returns the name of the file that records that a process has passed a point that another process waits for."""
    return f"{point}.step{step}.passed"


def point_of(method: str) -> str:
    """Converts the name of an RPC to the form used in names of failpoints: ComputeValues -> compute_values."""
    return re.sub(r"(?<!^)([A-Z])", r"_\1", method).lower()


_armed: Failpoints | None = None


def arm(config: DebugConfig, run_dir: Path, process: str, rank: int = 0) -> None:
    """Sets the failpoints of this process from the configuration; if it has none, `hit` does nothing."""
    global _armed
    _armed = Failpoints(config, run_dir, process, rank) if config.failpoints else None


def hit(point: str, step: int | None = None) -> None:
    """Reports that this process passes a named point, and does the action of a failpoint there, if it has one.

    Without `step` the step is that of `at_step`.
    """
    if _armed is not None:
        _armed.hit(point, step)


@contextmanager
def at_step(step: int) -> Iterator[None]:
    """Sets the step number that calls of `hit` inside the `with` block use if they get no step themselves."""
    if _armed is not None:
        _armed.step = step
    yield
