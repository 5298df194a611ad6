"""`events.jsonl`, in which nothing is ever removed: what happened in a run, with its losses."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from splitppo.run_folder.append_log import AppendLog, json_line

EVENTS_FILE = "events.jsonl"

# The fields of each kind of event, beside unix_s, epoch, step and kind, and what they say.
KINDS: Mapping[tuple[str, ...], str] = {
    ("start",): "`resumed_at`, `pid`, `host`, `version`; `changes`: keys with another value than at the last start",
    ("group_up",): "`role`, `instance_id`, `pids` by rank, `host` of rank 0",
    ("step", "validation", "checkpoint"): "`seconds`; `score` or `accuracy`",
    ("group_lost",): "`role`, `rank`, `method`, `phase` (null: not known) and `cause`, a sentence",
    ("recovery",): "`from_step`, `to_step`, the roles `restarted` and `kept`, `pause_s` (a sentence if there is no"
    " further restart)",
    ("recovered",): "`from_step`, `to_step`, `repeated_steps` (complete ones that are done again), `seconds` since the"
    " loss",
    ("cut",): "`spans`: what trace.json loses, `[pool, name, step, start, end]` in seconds, at most 2,000",
    ("rollout_restart",): "a lost rollout group is back, no step is done again: `cause`, `seconds`",
    ("record_failed",): "`why`",
    (
        "end",
    ): "`reason`, `exit_status`, `why` (the sentence by which the run failed; null if it did not), `record_cpu_s`"
    " (CPU seconds of the thread that records)",
}


def append_event(folder: Path, event: dict[str, Any]) -> None:
    """Appends one line to the events of a run folder."""
    AppendLog(folder / EVENTS_FILE).append(json_line(event))


def read_events(folder: Path) -> list[dict[str, Any]]:
    """Reads the events of a run folder, oldest first; ValueError, which names file and line, for a broken one."""
    return [event for _, event in AppendLog(folder / EVENTS_FILE).objects()]
