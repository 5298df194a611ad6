"""Wakes the process that feeds the trackers: it reads the lines of a run from their files."""

from collections.abc import Callable

from controller.tracking.events import Event, LineComplete, Restored, Sink, Validated


def waking(wake: Callable[[], None]) -> Sink:
    """Makes a sink that calls `wake` whenever metrics.jsonl was opened or has another line; it comes after its sink."""

    def receive(event: Event) -> None:
        has_own_line = isinstance(event, Validated) and event.line is not None
        if has_own_line or isinstance(event, Restored | LineComplete):
            wake()

    return receive
