"""Wakes the process that feeds the trackers: it reads the lines of a run from their files."""

from collections.abc import Callable

from controller.tracking.events import Event, LineComplete, Restored, Sink, Validated


def waking(wake: Callable[[], None]) -> Sink:
    """Makes a sink that calls `wake` whenever metrics.jsonl was opened or has another line.

    Register it after the sink that writes metrics.jsonl, so that the line is there when the process wakes. The file is
    opened at `Restored`, and a line is added at `LineComplete`, and at `Validated` if that has a line of its own.
    """

    def receive(event: Event) -> None:
        has_own_line = isinstance(event, Validated) and event.line is not None
        if has_own_line or isinstance(event, Restored | LineComplete):
            wake()

    return receive
