"""Appends to `events.jsonl`, in which nothing is ever removed: what happened in a run, with its losses."""

import os
from pathlib import Path
from typing import Any

from controller.tracking.step_file import json_line

EVENTS_FILE = "events.jsonl"


def append_event(folder: Path, event: dict[str, Any]) -> None:
    """Appends one line to the events of a run folder; begins a new line if a full disk has cut the last one off."""
    with (folder / EVENTS_FILE).open("a+b") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 1))
        is_torn = file.read() not in (b"", b"\n")
        file.write(b"\n" * is_torn + json_line(event))
