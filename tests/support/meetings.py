"""Failpoints that make two processes wait for each other, so that they overlap whichever of them is faster."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from splitppo.failpoints import FOLDER, passed_mark

# The points whose failpoints are armed in each schedule; in `serial` no call may wait for a later one.
ARMED = {
    "serial": (),
    "gather": ("actor.update.begin", "critic.update.begin", "actor.generate.part"),
    "overlap": ("critic.update", "actor.generate.part"),
}
# A point that no process passes: a process that waits for it goes on when the test calls `let_go`.
_NEVER = "critic.save_checkpoint.writing", 10**6
PAUSE_POINT = "actor.update.mini_batch"


def meetings(num_steps: int) -> dict[str, Any]:
    """Returns the section `debug` for groups in runs of `num_steps` steps.

    * gather: each update begins, and goes on when the other one has begun;
    * overlap: the critic's update goes on when the actor generates for the next step;
    * streamed: the actor hands on its first part, and goes on when the critic computes its values;
    * paused: the actor's updates of steps 2 and 3 go on when the test calls `let_go`.
    """
    steps = range(1, num_steps + 1)
    return {
        "failpoints": {
            "actor.update.begin": [wait(step, "critic.update.begin", step) for step in steps],
            "critic.update.begin": [wait(step, "actor.update.begin", step) for step in steps],
            "critic.update": [wait(step, "actor.generate", step + 1) for step in steps[:-1]],
            **parts_meet_values(num_steps),
            PAUSE_POINT: [pause(2), pause(3)],
        }
    }


def parts_meet_values(num_steps: int) -> dict[str, Any]:
    """Returns failpoints: the actor sends the first part of a generation, and waits until the critic works on it."""
    return {
        "actor.generate.part": [wait(step, "critic.compute_values", step) for step in range(1, num_steps + 1)],
    }


def pause(step: int) -> dict[str, Any]:
    """Returns a failpoint at which a process waits for `let_go`."""
    point, later = _NEVER
    return wait(step, point, later + step)


def pause_at(point: str, steps: Iterable[int]) -> dict[str, Any]:
    """Returns failpoints at which a process waits for `let_go` in some steps; `is_paused` says that it waits."""
    unreached, later = _NEVER
    return {
        point: [pause(step) for step in steps],
        unreached: [wait(later + step, point, step) for step in steps],
    }


def is_paused(run_dir: Path, point: str, step: int) -> bool:
    """Returns True if a process has reached a point of a step at which `pause_at` makes it wait."""
    return (run_dir / FOLDER / passed_mark(point, step)).exists()


def let_go(run_dir: Path, step: int) -> None:
    """Lets a process go on that waits at a failpoint of `pause` in a step, or will come to it."""
    marks = run_dir / FOLDER
    marks.mkdir(parents=True, exist_ok=True)
    point, later = _NEVER
    (marks / passed_mark(point, later + step)).touch()


def wait(step: int, point: str, at_step: int) -> dict[str, Any]:
    """Returns a failpoint at which a process waits in a step until another process has passed a point."""
    return {"step": step, "action": "wait", "after": {"point": point, "step": at_step}}
