"""`events.jsonl`, in which nothing is ever removed: what happened in a run, with its losses."""

from pathlib import Path
from typing import Any

from splitppo.run_folder.append_log import AppendLog, json_line

EVENTS_FILE = "events.jsonl"


def append_event(folder: Path, event: dict[str, Any]) -> None:
    """Appends one line to the events of a run folder."""
    AppendLog(folder / EVENTS_FILE).append(json_line(event))


def read_events(folder: Path) -> list[dict[str, Any]]:
    """Reads the events of a run folder, oldest first; ValueError, which names file and line, for a broken one."""
    return [event for _, event in AppendLog(folder / EVENTS_FILE).objects()]
