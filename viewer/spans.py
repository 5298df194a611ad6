"""The work of a run's pools from trace.json, with the work that recoveries have cut out of it."""

import io
from collections import deque
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from splitppo.run_folder.files import MAX_LINE_BYTES, MAX_LINES_BYTES, RunDir, Unreadable, finite
from splitppo.run_folder.spans import Span
from splitppo.run_folder.step_spans import PHASES, Steps
from splitppo.run_folder.trace import POOLS, TRACE_FILE, spans_of
from viewer.metrics import MAX_NAME, MAX_STEP

MAX_SPANS = 200_000
MAX_STEP_SPANS = 5_000
_READ_BYTES = 64 << 20
_DIGITS = 6
_LATEST_S = 1e11
_PIECE = ("pool", "name", "step", "start", "end")
_OTHER = "#8a99a6"  # the colour of a span whose name is not in PHASES


class Spans:
    """The spans of trace.json, read again when the file has changed.

    Attributes:
        lost: the spans of steps that the run has done again, oldest first.
    """

    def __init__(self, folder: RunDir) -> None:
        self.lost: Sequence[Span] = ()
        self._folder = folder
        self._stamp: tuple[int, int, int] | None = None  # of the file as last read
        self._is_whole = True  # all spans of the file were read, none cut off by MAX_SPANS or _READ_BYTES
        self._steps = Steps(())

    def add_lost(self, cuts: Iterable[Any]) -> None:
        """Adds the spans of events `cut`, lists of [pool, name, step, start, end]; skips what is no valid span."""
        rows = (row for cut in cuts if isinstance(cut, list) for row in cut)
        found = (Span(*row) for row in rows if isinstance(row, list) and len(row) == 5)
        self.lost = (*self.lost, *filter(_is_valid_span, found))[-MAX_SPANS:]

    def table(self) -> dict[str, Any]:
        """Returns the latest spans as columns, oldest first, with times in seconds since the first.

        The keys:
            unix_s: when the first span begins, in unix seconds.
            columns: of the spans: pool, name, step, start, end, lost (1 for a span that a recovery has cut out, else
                0); `pool` is an index in `pools`, `name` an index in `phases`.
            steps: the columns step, start, next_start, of all steps.
            shown: the number of a typical step.
            pools: the names of all pools.
            phases: a list [name, label, colour, is dark] for each name of a span.
            sentence: says that older spans are left out; None if all are here.
        """
        steps, first = self._read()
        spans = [(span, 0) for span in steps.spans] + [(span, 1) for span in self.lost]
        latest = sorted(spans, key=lambda item: item[0].started_s)[-MAX_SPANS:]
        names = list(dict.fromkeys(span.name for span, _ in latest))
        index_of = {name: index for index, name in enumerate(names)}
        span_rows = [
            (POOLS.index(span.pool), index_of[span.name], *_numbers(span, first), is_lost) for span, is_lost in latest
        ]
        step_rows = []
        for step in sorted(steps.made):
            start, _, next_start = steps.times(step)
            step_rows.append((step, *_since(first, start, next_start)))
        is_cut = len(spans) > len(latest) or not self._is_whole
        cut_sentence = f"These are the latest {len(latest):,} spans; those before are left out."
        return {
            "unix_s": first,
            "columns": _columns(("pool", "name", "step", "start", "end", "lost"), span_rows),
            "steps": _columns(("step", "start", "next_start"), step_rows),
            "shown": steps.to_show(),
            "pools": POOLS,
            "phases": [(name, *PHASES.get(name, (name, _OTHER, False))) for name in names],
            "sentence": cut_sentence if is_cut else None,
        }

    def step(self, step: int) -> dict[str, Any]:
        """Returns a step's times, in seconds since the first span, the busy seconds of pools, and the critical path.

        Raises:
            Unreadable: trace.json has no such step, or too much of it.
        """
        steps, first = self._read()
        if step not in steps.made:
            raise Unreadable(f"{TRACE_FILE} has no span of step {step}.")
        start, end, next_start = steps.times(step)
        num_spans = sum(span.started_s < next_start and span.finished_s > start for span in steps.spans)
        if num_spans > MAX_STEP_SPANS:
            raise Unreadable(
                f"{TRACE_FILE} has {num_spans:,} spans in step {step}; expected at most {MAX_STEP_SPANS:,}."
            )
        path = [(piece.pool, piece.name, *_numbers(piece, first)) for piece in steps.critical_path(step)]
        return {
            "step": step,
            **dict(zip(("start", "end", "next_start"), _since(first, start, end, next_start), strict=True)),
            "busy": {pool: round(seconds, _DIGITS) for pool, seconds in steps.busy(step).items()},
            "path": [dict(zip(_PIECE, piece, strict=True)) for piece in path],
        }

    def _read(self) -> tuple[Steps, float]:
        """Returns the spans by their steps, and when the first of all begins, in unix seconds.

        At most the last MAX_SPANS spans in the last _READ_BYTES of the file are read; `_is_whole` says whether those
        are all.

        Raises:
            Unreadable: there is no trace.json.
        """
        stamp = self._folder.stamp(TRACE_FILE)
        if stamp is None or stamp != self._stamp:
            with self._folder.open(TRACE_FILE, max_bytes=MAX_LINES_BYTES) as file:
                size = file.seek(0, io.SEEK_END)
                file.seek(max(0, size - _READ_BYTES))
                read_line = partial(io.TextIOWrapper(file, "utf-8", "replace").readline, MAX_LINE_BYTES)
                found = deque(filter(_is_valid_span, spans_of(iter(read_line, ""))), maxlen=MAX_SPANS)
            self._is_whole = size <= _READ_BYTES and len(found) < MAX_SPANS
            self._steps = Steps(tuple(found))
            self._stamp = stamp
        spans = (*self._steps.spans, *self.lost)
        return self._steps, min((span.started_s for span in spans), default=0.0)


def _since(first: float, *times: float) -> list[float]:
    """Converts unix seconds into seconds since the first span began, rounded."""
    return [round(time - first, _DIGITS) for time in times]


def _numbers(span: Span, first: float) -> list[float]:
    """Returns the step of a span, and its start and end in seconds since `first`."""
    return [span.step, *_since(first, span.started_s, span.finished_s)]


def _columns(names: Sequence[str], rows: Sequence[Sequence[Any]]) -> dict[str, list[Any]]:
    return {name: [row[place] for row in rows] for place, name in enumerate(names)}


def _is_valid_span(span: Span) -> bool:
    """Returns True for a span with a short printable name, a known pool, a step, and an end that follows its begin."""
    name: Any = span.name
    return (
        (isinstance(name, str) and name.isascii() and name.isprintable() and 0 < len(name) <= MAX_NAME)
        and span.pool in POOLS
        and (type(span.step) is int and 0 <= span.step <= MAX_STEP)
        and None not in (finite(span.started_s), finite(span.finished_s))
        and 0 <= span.started_s <= span.finished_s < _LATEST_S
    )
