"""Makes the connection to a tracker by the tracker's name; its client package is imported only then."""

from importlib import import_module

from controller.tracking.trackers.protocol import Run, Tracker


def connect(name: str, run: Run, sent_step: int) -> Tracker:
    """Connects to the tracker of this name, and returns the connection; raises the errors of the tracker's client.

    `sent_step` is the last step that the tracker was sent, -1 if none; only files that we write ourselves need it.
    """
    make = getattr(import_module(f"controller.tracking.trackers.{name}_tracker"), f"{name.capitalize()}Tracker")
    tracker: Tracker = make(run, sent_step) if name == "tensorboard" else make(run)
    return tracker
