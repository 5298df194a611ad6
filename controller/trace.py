"""The timeline of a run: who worked on what when, in Chrome's trace event format, which Perfetto shows.

`trace.json` is one JSON object with one event per line, so that a step is appended without writing the rest again.
"""

from __future__ import annotations

import json
import os
from bisect import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from controller.files import write_atomically

POOLS = ("actor", "critic", "controller", "reward")

# Validations, checkpoints and restores: work beside the calls of a step.
_BESIDE_STEPS = frozenset({"testing", "save_checkpoint", "load_checkpoint"})

_HEAD = '{"displayTimeUnit": "ms", "traceEvents": [\n'
_TAIL = "\n]}\n"


@dataclass(frozen=True, order=True)
class Span:
    """One piece of work of a pool (one of POOLS) for a step; times are unix seconds.

    Of a service it is what occupied its engine: of a checkpoint the snapshot, not the writing in the background. A
    validation and a checkpoint belong to the step whose weights they are about, a restore to the step restored.
    """

    pool: str
    name: str
    step: int
    started_s: float
    finished_s: float

    @property
    def duration_s(self) -> float:
        return self.finished_s - self.started_s

    @property
    def is_call(self) -> bool:
        """Whether it is a call of the step itself, and not a validation, checkpoint or restore beside it."""
        return self.name not in _BESIDE_STEPS


def busy_s(spans: Iterable[Span], started_s: float, finished_s: float) -> float:
    """Seconds of the interval in which at least one span runs."""
    busy, reached = 0.0, started_s
    for span in sorted(spans, key=lambda span: span.started_s):
        start, end = max(span.started_s, reached), min(span.finished_s, finished_s)
        if end > start:
            busy += end - start
            reached = end
    return busy


class Trace:
    """All spans of a run, those of earlier starts included, and their file."""

    def __init__(self, path: Path, *, restored_step: int | None) -> None:
        """Goes on with the file, cut back to the restored step; None starts afresh."""
        self._path = path
        self._spans: list[Span] = []
        self._lanes: dict[str, list[list[tuple[float, float]]]] = {}
        earlier = [] if restored_step is None else read_trace(path)
        self._rewrite([span for span in earlier if restored_step is None or span.step <= restored_step])

    @property
    def spans(self) -> Sequence[Span]:
        return self._spans

    def add(self, spans: Iterable[Span]) -> None:
        """Appends spans, in one write, to memory and file."""
        added = list(spans)
        if not added:
            return
        events = "".join(",\n" + json.dumps(self._event(span)) for span in added)
        with self._path.open("r+b") as file:
            file.seek(-len(_TAIL), os.SEEK_END)
            file.write((events + _TAIL).encode())
        self._spans += added

    def _rewrite(self, spans: list[Span]) -> None:
        self._spans = spans
        self._lanes.clear()
        events = [*_process_names(), *(self._event(span) for span in spans)]
        write_atomically(self._path, _HEAD + ",\n".join(json.dumps(event) for event in events) + _TAIL)

    def _event(self, span: Span) -> dict[str, Any]:
        return {
            "ph": "X",
            "pid": POOLS.index(span.pool) + 1,
            "tid": self._lane(span),
            "ts": round(span.started_s * 1e6, 3),
            "dur": round(span.duration_s * 1e6, 3),
            "name": span.name,
            "cat": span.pool,
            "args": {"step": span.step},
        }

    def _lane(self, span: Span) -> int:
        """The first line of the pool that is free meanwhile: events on one line must not overlap."""
        time = (span.started_s, span.finished_s)
        lanes = self._lanes.setdefault(span.pool, [])
        for number, lane in enumerate(lanes, start=1):
            place = bisect(lane, time)
            is_free_before = place == 0 or lane[place - 1][1] <= span.started_s
            if is_free_before and (place == len(lane) or span.finished_s <= lane[place][0]):
                lane.insert(place, time)
                return number
        lanes.append([time])
        return len(lanes)


def read_trace(path: Path) -> list[Span]:
    """The spans of a trace file; a line torn by a crash is left out. Empty if there is no file."""
    if not path.exists():
        return []
    spans = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            event = json.loads(line.rstrip(","))
        except ValueError:
            continue
        if isinstance(event, dict) and event.get("ph") == "X":
            start_s = event["ts"] / 1e6
            spans.append(
                Span(event["cat"], event["name"], event["args"]["step"], start_s, start_s + event["dur"] / 1e6)
            )
    return spans


def _process_names() -> list[dict[str, Any]]:
    """Metadata: one process per pool, in the order of POOLS."""
    events: list[dict[str, Any]] = []
    for pid, pool in enumerate(POOLS, start=1):
        events.append({"ph": "M", "pid": pid, "tid": 0, "name": "process_name", "args": {"name": pool}})
        events.append({"ph": "M", "pid": pid, "tid": 0, "name": "process_sort_index", "args": {"sort_index": pid}})
    return events
