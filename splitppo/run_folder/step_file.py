"""`metrics.jsonl`: one line of JSON per step.

A run that restores a step removes the lines of later steps, so that the file has every step once. A full disk ends the
run, because report, summary and trackers are made from these lines.
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from splitppo.config_error import config_errors
from splitppo.plain_file import check_plain
from splitppo.run_folder.append_log import AppendLog, Follower, json_line, object_of

METRICS_FILE = "metrics.jsonl"


class StepFile:
    """A file of one JSON line per step: {"step": 3, name: value, ...}; numbers that are not finite become null.

    Attributes:
        last_step: the step of the last line, -1 if there is no line.
    """

    def __init__(self, path: Path, restored_step: int = sys.maxsize) -> None:
        """Opens an existing file; removes steps after `restored_step`, and a last line that a crash has cut off.

        A `restored_step` of -1 removes all steps. If lines are removed, a new file (another inode) replaces the file,
        by which a reader notices the change.

        Raises:
            ConfigError: `read_metrics` cannot read the file.
        """
        self._log = AppendLog(path)
        kept = [row for row in read_metrics(path) if row["step"] <= restored_step]
        self._log.replace(map(json_line, kept))
        self.last_step: int = kept[-1]["step"] if kept else -1

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Appends the line of a step and waits until it is on disk; ValueError if the step is not after the last."""
        if step <= self.last_step:
            raise ValueError(f"{self._log.path.name}: step {step} comes after step {self.last_step}")
        self._log.append(json_line({"step": step, **values}), is_durable=True)
        self.last_step = step


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Reads metrics.jsonl; returns one dict per step, [] without a file.

    A last line that is cut off is left out; null becomes None.

    Raises:
        ConfigError: a line is broken, or steps do not rise; the message names file and line. Or this is no file.
    """
    with config_errors(ValueError):
        check_plain(path)
    rows: list[dict[str, Any]] = []
    with config_errors(ValueError, after="; mend or remove this line; nothing was changed"):
        for number, row in AppendLog(path).objects():
            place = f"{path}, line {number}"
            rows.append(check_step(row, place))
            if rows[1:] and row["step"] <= rows[-2]["step"]:
                raise ValueError(f"{place}: expected a step after {rows[-2]['step']}, got {row['step']}")
    return rows


def check_step(row: dict[str, Any], place: str) -> dict[str, Any]:
    """Checks that a row has an integer under "step", and returns the row; else ValueError that begins with `place`."""
    if not isinstance(row.get("step"), int):
        raise ValueError(f"{place}: expected an integer under step, got {row.get('step')!r}")
    return row


def follow_steps(path: Path) -> Follower:
    """Returns a reader of a file of steps that another process writes; a line without a step is a ValueError of it."""
    return Follower.of(path, parse=lambda line, place: check_step(object_of(line, place), place))
