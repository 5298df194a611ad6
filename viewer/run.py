"""One run as the pages see it: its state, its metrics and the files of its steps."""

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from splitppo.run_folder.events import EVENTS_FILE
from splitppo.run_folder.files import RunDir, Unreadable, finite, follower
from splitppo.run_folder.live import LIVE_FILE, is_gone
from splitppo.run_folder.metrics import ACCURACY, SCORE
from viewer.distributions import Distributions
from viewer.metrics import Float32s, Metrics
from viewer.redaction import redacted
from viewer.spans import Spans
from viewer.summaries import Footers

# The controller writes live.json every 5 s, and more often when something changes.
QUIET_AFTER_S = 15.0
_MARKS = ("metrics.jsonl", "config.yaml", LIVE_FILE, "events.jsonl", "summary.json")
_SPARKLINE = 60
MAX_RUNS = 500
MAX_EVENTS = 5_000
MAX_EVENT_TEXT = 2_000
MAX_EVENT_ITEMS = 200


class Run:
    """A run folder with what was read of it.

    Attributes:
        number: place in the table of runs, by which addresses name the run.
        events: the objects of events.jsonl, oldest first, each with its `number`, from 0.
    """

    def __init__(self, number: int, path: Path) -> None:
        self.number = number
        self.folder = RunDir(path)
        self.metrics = Metrics(self.folder)
        self.footers = Footers(self.folder)
        self.spans = Spans(self.folder)
        self.distributions = Distributions(self.folder)
        self.events: list[dict[str, Any]] = []
        self._events = follower(self.folder, EVENTS_FILE)
        self._lock = threading.Lock()

    def refresh(self) -> None:
        """Reads what the run has appended since the last call."""
        with self._lock:
            self.metrics.refresh()
            is_new, rows = self._events.read()
            if is_new:
                self.events.clear()
                self.spans.lost = ()
            self.spans.add_lost(self._noted(event) for event in rows)

    def _noted(self, event: dict[str, Any]) -> Any:
        """Adds an event of events.jsonl, and returns its spans of lost work, if it has any."""
        self.events.append(_told(event) | {"number": len(self.events)})
        return event.get("spans")

    def told_events(self, since: int = 0) -> list[dict[str, Any]]:
        """Returns the events from number `since` on, or the last MAX_EVENTS of them.

        If there are more, those of the kind `cut` are left out first, and of consecutive steps all but the last.
        """
        new = self.events[since:]
        if len(new) > MAX_EVENTS:
            new = [event for event in new if event.get("kind") != "cut"]
            kinds = [event.get("kind") for event in new]
            new = [event for event, *both in zip(new, kinds, [*kinds[1:], ""], strict=True) if both != ["step", "step"]]
        return new[-MAX_EVENTS:]

    def columns(self, numbers: Sequence[int], since: int) -> tuple[list[int], list[Float32s]]:
        """Returns the steps after `since`, and of each asked metric its float32 values at them."""
        with self._lock:
            steps = [step for step in self.metrics.steps if step > since]
            return steps, self.metrics.columns(numbers, since)

    def state(self) -> dict[str, Any]:
        """Returns {"state": live | quiet | gone | ended | unknown, "sentence", "why", "live": live.json or None}.

        `why` is the sentence by which a run that has ended failed; None otherwise, and in folders of older versions.
        """
        live, summary = (self._read(name) for name in (LIVE_FILE, "summary.json"))
        phase = live.get("phase")
        reason = str(summary.get("exit_reason", ""))
        quiet_s = time.time() - (finite(live.get("unix_s")) or 0.0)
        if live and phase != "ended" and is_gone(live):
            state = "gone", f"its controller (process {live.get('pid')}) is gone"
        elif live and phase != "ended":
            state = ("quiet", f"quiet for {quiet_s:.0f} s") if quiet_s > QUIET_AFTER_S else ("live", str(phase))
        elif reason or live:
            state = "ended", reason or "ended"
        else:
            state = "unknown", "no live.json: it is not known whether this run still works"
        why = summary.get("why") if state[0] == "ended" else None
        shown_why = redacted(why[:MAX_EVENT_TEXT]) if isinstance(why, str) else None
        return {"state": state[0], "sentence": state[1], "why": shown_why, "live": live or None}

    def _read(self, name: str) -> dict[str, Any]:
        """Reads a JSON file of the run; {} without it.

        A broken summary says so in place of the reason why the run ended.
        """
        try:
            return self.folder.json(name)
        except Unreadable as error:
            return {"exit_reason": str(error)} if name == "summary.json" and self.folder.stamp(name) else {}

    def overview(self) -> dict[str, Any]:
        """Returns the line of the run in the table of runs, which those that were removed have left."""
        self.refresh()
        state = self.state()
        total = (state["live"] or {}).get("total_steps")
        return {
            "number": self.number,
            "name": self.folder.path.name,
            "path": str(self.folder.path),
            **state,
            "is_removed": not self.folder.path.exists(),
            "error": None if self.folder.path.is_dir() else f"The run folder {self.folder.path} cannot be read.",
            "generation": self.metrics.generation,
            "step": self.metrics.steps[-1] if self.metrics.steps else None,
            "total_steps": total if isinstance(total, int) else None,
            "score": next(iter(self.metrics.recent(SCORE)), None),
            "accuracy": next(iter(self.metrics.recent(ACCURACY)), None),
            "recent": self.metrics.recent(SCORE, _SPARKLINE),
            "lines_broken": self.metrics.lines_broken,
        }


def find_runs(paths: Sequence[Path]) -> list[Path]:
    """Returns run folders: those of `paths` that are one, and else those that lie in them.

    Raises:
        Unreadable: one of the paths is neither; the message names it.
    """
    found: list[Path] = []
    for path in paths:
        if not path.is_dir():
            raise Unreadable(f"{path} is no folder; expected a run folder, or one that holds run folders")
        inner = [path] if is_run(path) else sorted(filter(is_run, path.iterdir()))
        if not inner:
            raise Unreadable(
                f"{path} is no run folder and holds none: none of {', '.join(_MARKS)} is there (--wait: wait for one)"
            )
        found += inner
    unique = list(dict.fromkeys(path.resolve() for path in found))
    if len(unique) > MAX_RUNS:
        raise Unreadable(f"these are {len(unique)} runs; the viewer shows at most {MAX_RUNS}: name some of them")
    return unique


def is_run(path: Path) -> bool:
    """Returns True for a folder that holds at least one file of a run."""
    return any((path / mark).is_file() for mark in _MARKS)


def _told(event: dict[str, Any]) -> dict[str, Any]:
    """Returns an event as pages get it: short, without secrets, and with the number of its spans of lost work."""

    def shortened(value: Any) -> Any:
        if isinstance(value, str):
            return redacted(value[:MAX_EVENT_TEXT])
        if isinstance(value, list):
            return [shortened(element) for element in value[:MAX_EVENT_ITEMS]]
        return value if value is None or isinstance(value, int | float) else redacted(str(value)[:MAX_EVENT_TEXT])

    spans = {"spans": len(event["spans"])} if isinstance(event.get("spans"), list) else {}
    return {name[:MAX_EVENT_TEXT]: shortened(value) for name, value in (event | spans).items()}
