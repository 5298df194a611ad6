"""Failpoints that let two processes meet: what is to be seen at the same time does not depend on who is faster."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from splitppo.failpoints import FOLDER, passed_mark

# Points whose failpoints are armed under each schedule; under `serial` nothing may wait for what comes after it.
ARMED = {
    "serial": (),
    "gather": ("actor.update.begin", "critic.update.begin", "actor.generate.part"),
    "overlap": ("critic.update", "actor.generate.part"),
}
# A point that nobody passes: the test itself lets go of what is held there.
_NEVER = "critic.save_checkpoint.writing", 10**6
HELD = "actor.update.mini_batch"


def meetings(num_steps: int) -> dict[str, Any]:
    """The section `debug` of the groups of runs of `num_steps` steps.

    * gather: each update begins, and goes on when the other one has begun;
    * overlap: the critic's update goes on when the actor generates for the next step;
    * streamed: the actor hands on its first part, and goes on when the critic computes its values;
    * held: the actor's updates of steps 2 and 3 go on when the test says so (`let_go`).
    """
    steps = range(1, num_steps + 1)
    return {
        "failpoints": {
            "actor.update.begin": [_wait(step, "critic.update.begin", step) for step in steps],
            "critic.update.begin": [_wait(step, "actor.update.begin", step) for step in steps],
            "critic.update": [_wait(step, "actor.generate", step + 1) for step in steps[:-1]],
            **parts_meet_values(num_steps),
            HELD: [held(2), held(3)],
        }
    }


def parts_meet_values(num_steps: int) -> dict[str, Any]:
    """Failpoints: the actor hands on the first part of a generation, and goes on when the critic works on it."""
    return {
        "actor.generate.part": [_wait(step, "critic.compute_values", step) for step in range(1, num_steps + 1)],
    }


def held(step: int) -> dict[str, Any]:
    """A failpoint that holds a process until `let_go`."""
    point, later = _NEVER
    return _wait(step, point, later + step)


def held_at(point: str, steps: Iterable[int]) -> dict[str, Any]:
    """Failpoints that hold a process at a point of some steps until `let_go`, and have `is_held` see it."""
    unreached, later = _NEVER
    return {
        point: [held(step) for step in steps],
        unreached: [_wait(later + step, point, step) for step in steps],
    }


def is_held(run_dir: Path, point: str, step: int) -> bool:
    """Returns True if a process has come to a point of a step at which `held_at` holds it."""
    return (run_dir / FOLDER / passed_mark(point, step)).exists()


def let_go(run_dir: Path, step: int) -> None:
    """Lets a process that is, or would be, `held` in a step go on."""
    marks = run_dir / FOLDER
    marks.mkdir(parents=True, exist_ok=True)
    point, later = _NEVER
    (marks / passed_mark(point, later + step)).touch()


def _wait(step: int, point: str, at_step: int) -> dict[str, Any]:
    return {"step": step, "action": "wait", "after": {"point": point, "step": at_step}}
