"""The timeline of a run: who worked on what when, in Chrome's trace event format, which Perfetto shows.

`trace.json` is one JSON object with one event per line, so that a step is appended without writing the rest again.
"""

import json
import os
from bisect import bisect
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from controller.workers.span import Span
from splitppo.atomic_write import write_atomically

POOLS = ("actor", "critic", "controller", "scoring", "reward")

# Metadata: a process per pool.
_PROCESSES = [
    {"ph": "M", "pid": pid, "tid": 0, "name": f"process_{key}", "args": {key: value}}
    for pid, pool in enumerate(POOLS, start=1)
    for key, value in (("name", pool), ("sort_index", pid))
]
_HEAD = '{"displayTimeUnit": "ms", "traceEvents": [\n'
_TAIL = "\n]}\n"


class Trace:
    """All spans of a run, those of earlier starts included, and their file."""

    def __init__(self, path: Path, *, restored_step: int) -> None:
        """Goes on with the file, cut back to the restored step; -1 starts afresh."""
        self._path = path
        self.spans = [span for span in read_trace(path) if span.step <= restored_step]
        self._lanes: dict[str, list[list[tuple[float, float]]]] = defaultdict(list)
        events = [*_PROCESSES, *map(self._event, self.spans)]
        write_atomically(path, _HEAD + ",\n".join(map(json.dumps, events)) + _TAIL)

    def add(self, spans: Sequence[Span]) -> None:
        """Appends spans, in one write, to memory and file."""
        if not spans:
            return
        events = "".join(",\n" + json.dumps(self._event(span)) for span in spans)
        with self._path.open("r+b") as file:
            file.seek(-len(_TAIL), os.SEEK_END)
            file.write((events + _TAIL).encode())
        self.spans += spans

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
        time, lanes = (span.started_s, span.finished_s), self._lanes[span.pool]
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
    spans: list[Span] = []
    if not path.exists():
        return spans
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            event = json.loads(line.rstrip(","))
        except ValueError:
            continue
        if isinstance(event, dict) and event.get("ph") == "X":
            start_s, duration_s = event["ts"] / 1e6, event["dur"] / 1e6
            spans.append(Span(event["cat"], event["name"], event["args"]["step"], start_s, start_s + duration_s))
    return spans
