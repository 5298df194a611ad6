"""Writes and reads `trace.json`, the timeline of the pools' work, in Chrome's trace event format, for Perfetto.

`trace.json` is one JSON array with one event per line, so that a step can be appended. An
interrupted write does no harm, because in this format the end of the array may be missing.
"""

import json
import os
from bisect import bisect
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from splitppo.atomic_write import write_atomically
from splitppo.plain_file import errors_named, open_plain
from splitppo.run_folder.spans import Span

TRACE_FILE = "trace.json"
# In the order of the rows: a rollout group may take turns with the critic, on the same devices.
POOLS = ("actor", "critic", "rollout", "controller", "scoring", "reward", "environments")

_TAIL = "\n]"
# What reading a line raises that holds no span of ours.
_NO_SPAN = (ValueError, TypeError, LookupError, ArithmeticError, AttributeError, RecursionError)
# The number of spans that are remembered per line of the timeline: enough for spans that come some steps late.
_REMEMBERED_SPANS = 256


def _rows_of_pools() -> Iterator[dict[str, Any]]:
    """Yields the metadata of the trace: a process per pool, in the order of the pools."""
    for pid, pool in enumerate(POOLS, start=1):
        for key, value in (("name", pool), ("sort_index", pid)):
            yield {"ph": "M", "pid": pid, "tid": 0, "name": f"process_{key}", "args": {key: value}}


class Trace:
    """The trace file with all spans of a run, also of earlier starts. Only the latest spans are in memory."""

    def __init__(self, path: Path, spans: Iterable[Span] = ()) -> None:
        """Writes the trace file anew, with these spans."""
        self._path = path
        self._lanes: dict[str, list[list[tuple[float, float]]]] = defaultdict(list)
        events = [*_rows_of_pools(), *map(self._event, spans)]
        write_atomically(path, "[\n" + ",\n".join(map(json.dumps, events)) + _TAIL)

    def add(self, spans: Sequence[Span]) -> None:
        """Appends spans to the trace file, in one write."""
        events = "".join(",\n" + json.dumps(self._event(span)) for span in spans)
        with errors_named(self._path), open_plain(self._path, "r+b") as file:
            file.seek(-len(_TAIL), os.SEEK_END)
            file.write((events + _TAIL).encode())

    def _event(self, span: Span) -> dict[str, Any]:
        """Converts a span to a complete event ("X") of the trace: microseconds, the pool as pid, a free row as tid."""
        return {
            "ph": "X",
            "pid": POOLS.index(span.pool) + 1,
            "tid": self._lane(span),
            "ts": round(span.started_s * 1e6, 3),
            "dur": round(span.duration_s * 1e6, 3),
            "name": span.name,
            "cat": span.pool,
            "args": {"step": span.step} | ({"parts": span.parts} if span.parts else {}),
        }

    def _lane(self, span: Span) -> int:
        """Returns the number of the pool's first free row in the trace, because events in one row must not overlap.

        Only the latest spans of a row are known. So before the first known one a row is free only if it has forgotten
        none.
        """
        time = (span.started_s, span.finished_s)
        lanes = self._lanes[span.pool]
        for number, lane in enumerate(lanes, start=1):
            place = bisect(lane, time)
            is_free_before = lane[place - 1][1] <= span.started_s if place else len(lane) < _REMEMBERED_SPANS
            if is_free_before and (place == len(lane) or span.finished_s <= lane[place][0]):
                lane.insert(place, time)
                del lane[:-_REMEMBERED_SPANS]
                return number
        lanes.append([time])
        return len(lanes)


def read_trace(path: Path) -> list[Span]:
    """Parses and returns the spans of a trace file; skips broken lines and other events; [] without a file."""
    if not path.exists():
        return []
    with open_plain(path) as file:
        return list(spans_of(line.decode(errors="replace") for line in file))


def spans_of(lines: Iterable[str]) -> Iterator[Span]:
    """Yields the spans that lines of a trace file hold."""
    for line in lines:
        with suppress(*_NO_SPAN):
            yield _span_of(json.loads(line.rstrip(",\n")))


def _span_of(event: Any) -> Span:
    """Converts an event of the trace format to a `Span`; raises if the event lacks a key that a span needs."""
    POOLS.index(event["cat"])
    start_s = event["ts"] / 1e6
    duration_s = event["dur"] / 1e6
    args = event["args"]
    return Span(event["cat"], event["name"], int(args["step"]), start_s, start_s + duration_s, args.get("parts", ()))
