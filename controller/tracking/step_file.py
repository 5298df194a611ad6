"""Reads and appends the files with one line of JSON per step: `metrics.jsonl` and `samples.jsonl`.

A run that restores a step removes the lines of later steps, so that each file has every step once. A full disk ends the
run, because report, summary and trackers are made from these lines.
"""

import json
import math
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from splitppo.atomic_write import write_atomically
from splitppo.config_error import config_errors
from splitppo.jsonl import check_is_file, read_jsonl

METRICS_FILE = "metrics.jsonl"
SAMPLES_FILE = "samples.jsonl"
# The columns of "samples" in samples.jsonl.
SAMPLE_COLUMNS = ("split", "data_source", "prompt", "response", "ground_truth", "score")


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
        self._path = path
        kept = [row for row in read_metrics(path) if row["step"] <= restored_step]
        content = path.read_bytes() if path.exists() else None
        lines = b"".join(map(json_line, kept))
        if lines != (content or b""):
            write_atomically(path, lines)
        self.last_step: int = kept[-1]["step"] if kept else -1

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Appends the line of a step and waits until it is on disk; ValueError if the step is not after the last."""
        if step <= self.last_step:
            raise ValueError(f"{self._path.name}: step {step} comes after step {self.last_step}")
        with self._path.open("ab") as file:
            file.write(json_line({"step": step, **values}))
            file.flush()
            os.fsync(file.fileno())
        self.last_step = step


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Reads metrics.jsonl or samples.jsonl; returns one dict per step, [] without a file.

    A last line that is cut off is left out; null becomes None.

    Raises:
        ConfigError: a line is broken, or steps do not rise; the message names file and line. Or this is no file.
    """
    if not path.exists():
        return []
    with config_errors(ValueError):
        check_is_file(path)
    rows: list[dict[str, Any]] = []
    with config_errors(ValueError, after="; mend or remove this line; nothing was changed"):
        for number, row in read_jsonl(path, until_torn=True):
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


def json_line(value: Mapping[str, Any]) -> bytes:
    """Converts a mapping to a line of strict JSON: NaN and infinity become null, arrays lists, other types text."""
    text = json.dumps(json_value(value), ensure_ascii=False, allow_nan=False, default=str)
    return text.encode(errors="backslashreplace") + b"\n"  # half a character is an escape of JSON


def json_value(value: Any) -> Any:
    """Makes of a value what strict JSON has: NaN and infinity become null, arrays lists; other types stay."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): json_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_value(item) for item in value]
    return json_value(value.tolist()) if hasattr(value, "tolist") else value  # numpy scalars and arrays
