"""Timelines for the viewer's tests, made by the description of trace.json alone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

T0 = 1_760_000_000.0
PIDS = ("actor", "critic", "rollout", "controller", "scoring", "reward", "environments")
Work = tuple[str, str, int, float, float]


def spans_of(step: int, *, critic_s: float = 0.5, step_s: float = 1.1) -> list[Work]:
    """The work of a step, which begins every `step_s` seconds: scores that are streamed, an update of the critic."""
    start = T0 + step * step_s
    scores = [("scoring", "score", step, start + 0.2 + at / 50, start + 0.215 + at / 50) for at in range(11)]
    return [
        ("actor", "gen", step, start, start + 0.4),
        *scores,
        ("actor", "ref", step, start + 0.405, start + 0.55),
        ("critic", "values", step, start + 0.3, start + 0.52),
        ("controller", "adv", step, start + 0.555, start + 0.57),
        ("actor", "update_actor", step, start + 0.59, start + 1.05),
        ("critic", "update_critic", step, start + 0.59, start + 0.59 + critic_s),
    ]


def write_trace(folder: Path, spans: Sequence[Work]) -> None:
    """Writes trace.json, as one line per event."""
    lines = [
        {
            "ph": "X",
            "pid": PIDS.index(pool) + 1,
            "tid": 1,
            "ts": round(start * 1e6, 3),
            "dur": round((end - start) * 1e6, 3),
        }
        | {"name": name, "cat": pool, "args": {"step": step}}
        for pool, name, step, start, end in spans
    ]
    (folder / "trace.json").write_text("[\n" + ",\n".join(map(json.dumps, lines)) + "\n]")
