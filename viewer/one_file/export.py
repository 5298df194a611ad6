"""python -m viewer export RUN... --out FILE: make one HTML file of runs, which opens without a server or a network.

It has all curves and events, and of the recorded steps as many responses as --max-mb leaves room for: the last step and
the first one, those with a loss, then others evenly between them.
"""

from __future__ import annotations

import argparse
import base64
import gzip
import json
import math
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from splitppo.atomic_write import write_atomically
from splitppo.run_folder.files import Unreadable
from viewer.answers import ANSWERS, Answer, facts, responses_by_token
from viewer.comparison.prompts import fixed_prompts
from viewer.live import dump
from viewer.one_file.page import one_page
from viewer.run import Run, find_runs

MAX_MB = 25.0
MAX_MAX_MB = 2_000
_USER_ERROR = 2
_KINDS = ("train", "val")


def main(arguments: Sequence[str]) -> int:
    """Writes the file; returns the exit status, 2 for a mistake of the user, which is told in one sentence."""
    parser = argparse.ArgumentParser(
        prog="python -m viewer export", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", metavar="RUN", nargs="+", type=Path, help="a run folder, or one that holds some")
    parser.add_argument("--out", metavar="FILE", type=Path, required=True, help="the file to write, e.g. run.html")
    parser.add_argument("--max-mb", metavar="MB", type=megabytes, default=MAX_MB, help="its size (default %(default)s)")
    options = parser.parse_args(arguments)
    out = Path(os.path.realpath(options.out))  # what a link leads to is written, and the link stays
    try:
        if out.exists() and not out.is_file():
            raise Unreadable(f"--out {options.out}: this is no plain file")
        file = Export([Run(number, path) for number, path in enumerate(find_runs(options.runs))], options.max_mb)
        write_atomically(out, one_page(file.saved).encode())
    except (Unreadable, OSError, ValueError) as error:
        sys.stderr.write(f"error: {error}\n")
        return _USER_ERROR
    size = out.stat().st_size / 1e6
    sys.stdout.write(f"{options.out}: {size:.1f} MB, {file.num_responses} responses of {_counted(file.num_steps)}\n")
    return 0


class Export:
    """Collects what a file holds of some runs.

    Attributes:
        saved: answers of the server, compressed by gzip and as base64, by their addresses below /api/.
        num_steps: how many recorded steps are there, by their kind, "train" or "val".
        num_responses: how many responses these have.
    """

    def __init__(self, runs: Sequence[Run], max_mb: float) -> None:
        """Collects the answers for the file, until the next one has no room; Unreadable if not even all curves have.

        The order is that of importance. First come facts, curves and events of all runs; then what has a number of its
        own (prompts, logs, times of steps), where each kind may fill a small part of the room; then recorded steps, the
        runs in turns. At the end the facts of each run are written again, with just those steps that are in the file.
        """
        self.saved: dict[str, str] = {}
        self.num_steps = Counter[str]()
        self.num_responses = 0
        self._bytes_left = int(max_mb * 1e6) - len(one_page({}).encode())
        told = {run.number: _facts(run) for run in runs}
        lines = [{name: told[run.number][name] for name in run.overview()} for run in runs]
        self._put({"runs": {"runs": lines}})
        for run in runs:
            self._put({f"runs/{run.number}": told[run.number], **_whole(run)})
        if self._bytes_left < 0:
            more = f"{-self._bytes_left / 1e6:.1f} MB more"
            raise Unreadable(f"--max-mb {max_mb:g}: the pages and the curves of these runs alone take {more}")
        room = self._bytes_left // 8 // len(runs)
        for run in runs:
            for path, numbers in _numbered(run):
                self._add_some(run, path, numbers, self._bytes_left - room)
        for run, kind, step in _in_turns([steps_of(run) for run in runs]):
            if not self._add_step(run, kind, step):
                break
        for run in runs:
            place = f"runs/{run.number}"
            facts_of_run = told[run.number]
            for kind in _KINDS:
                facts_of_run[kind] = [step for step in facts_of_run[kind] if f"{place}/{kind}/{step}" in self.saved]
            self._put({place: facts_of_run})

    def _add_some(self, run: Run, path: str, numbers: Sequence[int], least: float) -> None:
        """Adds the answers to addresses that differ in one number, the first ones first, as far as there is room."""
        before, name, after = re.split(r"{(\w+):int}", path)
        for number in numbers:
            value = _told(ANSWERS[path], run, **{name: number})
            images = self._images(run, value.get("images", ()) if isinstance(value, dict) else ())
            if not self._put({f"runs/{run.number}{before}{number}{after}": value, **images}, least):
                break

    def _add_step(self, run: Run, kind: str, step: int) -> bool:
        """Adds a step and its recorded responses if there is room for all of it; returns whether there was."""
        path = f"/{kind}/{{step:int}}"
        place = f"runs/{run.number}/{kind}/{step}"
        table = _told(ANSWERS[path], run, step=step)
        columns = table.get("columns", {})
        chosen = columns.get("why" if kind == "train" else "fixed") or []
        rows = [row for row, is_recorded in zip(columns.get("row", []), chosen, strict=False) if is_recorded]
        values = {f"{place}/{row}": _shortened(value) for row, value in _told_rows(run, kind, step, rows)}
        names = [name for value in values.values() for name in value.get("row", {}).get("images", ())]
        if not self._put({place: table, **values, **self._images(run, names)}, least=0):
            return False
        self.num_steps[kind] += 1
        self.num_responses += len(rows)
        if sys.stderr.isatty():
            sys.stderr.write(f"\r{self.num_steps.total()} steps, room for {self._bytes_left / 1e6:.1f} MB more \r")
        return True

    def _images(self, run: Run, names: Iterable[str]) -> dict[str, Any]:
        """Returns images by their addresses, each once, but for those that the file has already."""
        addresses = {f"runs/{run.number}/images/{name}": name for name in names}
        answer = ANSWERS["/images/{name}"]
        return {place: _told(answer, run, name=name) for place, name in addresses.items() if place not in self.saved}

    def _put(self, values: Mapping[str, Any], least: float = -math.inf) -> bool:
        """Adds answers by their addresses if they leave at least so many bytes; returns whether they do."""
        found = {address: packed(value) for address, value in values.items()}
        left = self._bytes_left - sum(len(text) + len(address) + 8 for address, text in found.items())
        if left >= least:
            self._bytes_left = left
            self.saved |= found
        return left >= least


def _counted(num_steps: Mapping[str, int]) -> str:
    """Returns "30 steps and 7 validations"."""
    words = {"train": "step", "val": "validation"}
    return " and ".join(
        f"{num_steps[kind]} {word}{'' if num_steps[kind] == 1 else 's'}" for kind, word in words.items()
    )


def megabytes(text: str) -> float:
    """Reads the size of a file; argparse tells what is wrong with another text."""
    size = float(text)
    if not 0 < size <= MAX_MAX_MB:
        raise argparse.ArgumentTypeError(f"expected a size from 0 to {MAX_MAX_MB:,} MB, got {text}")
    return size


def _facts(run: Run) -> dict[str, Any]:
    """Returns the facts of a run; one that still works is told as of now."""
    told = facts(run)
    if told["state"] not in ("live", "quiet"):
        return told
    return told | {"state": "saved", "sentence": time.strftime("as of %Y-%m-%d %H:%M", time.gmtime()), "live": None}


def _whole(run: Run) -> dict[str, Any]:
    """Returns what the pages ask of a run without saying a step, but for its facts."""
    steps, columns = run.columns(range(len(run.metrics.names)), -1)
    paths = [path for path in ANSWERS if "{" not in path and path not in ("", "/columns")]
    found = {f"runs/{run.number}{path}": _told(ANSWERS[path], run) for path in paths}
    return {f"runs/{run.number}/columns": {"steps": steps, "columns": [_numbers(one) for one in columns]}, **found}


def _numbered(run: Run) -> list[tuple[str, Sequence[int]]]:
    """Returns what pages ask with the number of a prompt, an event or a step of the timeline, and these numbers."""
    events = run.told_events()[::-1]
    losses = [one["number"] for one in events if one.get("kind") in ("group_lost", "start") or one is events[0]]
    return [
        ("/prompts/{prompt:int}", [prompt["prompt_index"] for prompt in fixed_prompts(run.folder)["prompts"]]),
        ("/log/{number:int}", losses),
        ("/timeline/{step:int}", spread(_told(ANSWERS["/timeline"], run).get("steps", {}).get("step", []))),
    ]


def steps_of(run: Run) -> list[tuple[Run, str, int]]:
    """Returns the recorded steps of a run, the most telling first: the ends, those with a loss, then evenly."""
    lost = [event.get("step") for event in run.events if event.get("kind") == "group_lost"]
    return list(_in_turns([[(run, kind, step) for step in spread(run.folder.steps(kind), lost)] for kind in _KINDS]))


def spread(steps: Sequence[int], first: Collection[Any] = ()) -> list[int]:
    """Orders steps: the ends, those of `first`, then so that each beginning of the list covers all of them evenly."""
    oldest = len(steps) - 1

    def rank(age: int) -> tuple[bool, bool, int]:
        """The sort key of the step with so many newer ones: multiples of large powers of two come first."""
        power_of_two = age & -age or len(steps)  # the largest that divides `age`
        return 0 < age < oldest, steps[oldest - age] not in first, -power_of_two

    return [steps[oldest - age] for age in sorted(range(len(steps)), key=rank)]


def _in_turns(lists: Sequence[Sequence[Any]]) -> Iterator[Any]:
    for place in range(max(map(len, lists), default=0)):
        yield from (items[place] for items in lists if place < len(items))


def _numbers(column: Iterable[float]) -> list[float]:
    """Rounds float32s to the digits that they have; NaN becomes null on the way to the page."""
    return [float(f"{value:.7g}") for value in column]


def _shortened(value: Any) -> Any:
    """Rounds all numbers to the five digits that 16 bits hold, which makes a file smaller by a quarter."""
    return json.loads(dump(value), parse_float=lambda digits: float(f"{float(digits):.5g}"))


def packed(value: Any) -> str:
    """Compresses an answer as the page reads it; what JSON has not is a sentence in its place."""
    try:
        text = dump(value)
    except Unreadable as error:
        text = dump({"unreadable": str(error)})
    return base64.b64encode(gzip.compress(text.encode(), 6, mtime=0)).decode()


def _told(answer: Answer, run: Run, **path: int | str) -> Any:
    """Returns what the server answers, or, for what cannot be read, the sentence about it."""
    try:
        return answer(run, path, {})
    except Unreadable as error:
        return {"unreadable": str(error)}


def _told_rows(run: Run, kind: str, step: int, rows: Sequence[int]) -> Iterator[tuple[int, Any]]:
    """Returns rows of a step with what the server answers about each, or the sentence about what cannot be read."""
    left = list(rows)
    try:
        for value in responses_by_token(run, kind, step, rows):
            yield left.pop(0), {"unreadable": str(value)} if isinstance(value, Unreadable) else value
    except Unreadable as error:
        yield from ((row, {"unreadable": str(error)}) for row in left)
