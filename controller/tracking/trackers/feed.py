"""Sends the steps of a run folder to one tracker: every step once, in order, whatever fails on the way.

metrics.jsonl is the queue: memory stays small while a server is away, and no step is lost if a process dies.
`trackers/NAME.json` has the last step that was sent. A tracker that knows its last step overrides this file.
"""

import errno
import hashlib
import json
import logging
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from controller.tracking.trackers.protocol import Run, Tracker, reason_of
from splitppo.atomic_write import write_atomically
from splitppo.plain_file import read_plain
from splitppo.run_folder.metrics import ACCURACY
from splitppo.run_folder.samples import TRAINED, VALIDATED, read_samples, rollouts_file
from splitppo.run_folder.step_file import METRICS_FILE, follow_steps

log = logging.getLogger(__name__)

POLL_INTERVAL_S = 0.5
FIRST_PAUSE_S = 1.0
MAX_PAUSE_S = 60.0
MAX_ENDING_PAUSE_S = 2.0  # at the end of the run, a server that comes back must be noticed soon
MAX_WAIT_FOR_SAMPLES_S = 10.0  # a step whose record has failed has none
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)  # a later attempt would fail, too

Connect = Callable[[str, Run, int], Tracker]


@dataclass(frozen=True)
class Cursor:
    """Remembers the last step that one tracker was sent.

    Attributes:
        step: the last step that was sent, -1 if none.
        inode: the inode of the metrics.jsonl that the step was read from.
        report: sha256 of the last report.png that was sent.
    """

    step: int = -1
    inode: int = 0
    report: str = ""

    @classmethod
    def load(cls, path: Path) -> Self:
        """Reads a tracker's last sent step from its file; -1 if there is no file, or the file cannot be read."""
        try:
            return cls(**json.loads(read_plain(path)))
        except (OSError, ValueError, TypeError):
            return cls()


class Feed:
    """Sends a run's steps to one tracker; a thread of its own runs the method `run`.

    Attributes:
        name: the tracker's name.
        is_done: True when the tracker has everything.
    """

    def __init__(self, name: str, run: Run, connect: Connect, is_ending: threading.Event) -> None:
        """Makes a feed: `connect(name, run, last sent step)` connects, `is_ending` is set after the last line."""
        self.name = name
        self.is_done = False
        self._run = run
        self._connect = connect
        self._is_ending = is_ending
        self._lines = follow_steps(run.folder / METRICS_FILE)
        self._cursor_file = run.folder / "trackers" / f"{name}.json"
        self._cursor = Cursor()
        self._tracker: Tracker | None = None
        self._is_failing = False
        self._has_pyarrow = True

    def run(self) -> None:
        """Sends the tracker all steps, also future ones, until the run has ended; repeats whatever fails."""
        pause_s = FIRST_PAUSE_S
        self._cursor = Cursor.load(self._cursor_file)
        while not self.is_done:
            is_ending = self._is_ending.is_set()
            try:
                self._send_new()
                if is_ending:
                    self._finish()
            except Exception as error:  # noqa: BLE001 - a client may raise anything, and the run goes on
                self._drop(error)
                if is_ending and isinstance(error, OSError) and error.errno in _DISK_ERRORS:
                    return
                if is_ending:
                    time.sleep(min(pause_s, MAX_ENDING_PAUSE_S))
                else:
                    self._is_ending.wait(pause_s)
                pause_s = min(2.0 * pause_s, MAX_PAUSE_S)
            else:
                pause_s = FIRST_PAUSE_S
                self._is_ending.wait(POLL_INTERVAL_S)

    def _send_new(self) -> None:
        """Sends the tracker the steps in metrics.jsonl that it was not sent yet; connects once there is a step."""
        _, rows = self._lines.read()
        if self._tracker is None and next(rows, None) is not None:
            self._tracker = self._connected()
            _, rows = self._lines.read()
        for row in rows:
            assert self._tracker is not None
            self._send(self._tracker, row)
        if self._is_failing and self._tracker is not None:
            self._is_failing = False
            log.info("tracker %s is back, and has every step up to %d", self.name, self._cursor.step)

    def _send(self, tracker: Tracker, row: dict[str, Any]) -> None:
        """Sends a step, unless the tracker has it; if the file is another one, the run has gone back before."""
        if self._lines.inode != self._cursor.inode:
            step = -1 if tracker.rewind() else self._cursor.step
            self._move(step=step, inode=self._lines.inode)
        step = row["step"]
        if step > self._cursor.step:
            metrics = {name: value for name, value in row.items() if name != "step" and value is not None}
            tracker.log(step, metrics, self._samples_of(step, metrics))
            self._move(step=step)

    def _move(self, **changes: Any) -> None:
        """Changes the cursor; the change is on disk when the method returns."""
        moved = replace(self._cursor, **changes)
        write_atomically(self._cursor_file, json.dumps(vars(moved)) + "\n")
        self._cursor = moved

    def _connected(self) -> Tracker:
        """Connects to the tracker, and reads the run's files from the start; steps that were sent are skipped."""
        tracker = self._connect(self.name, self._run, self._cursor.step)
        if tracker.last_step is not None:
            self._move(step=tracker.last_step)
        self._lines.restart()
        return tracker

    def _samples_of(self, step: int, metrics: Mapping[str, Any]) -> list[list[Any]]:
        """Reads the samples of a step, which the controller writes in a thread, soon after the line of the step."""
        if not self._has_pyarrow:
            return []
        self._wait_for_samples(step, metrics)
        try:
            return read_samples(self._run.folder, step)
        except ImportError:
            self._has_pyarrow = False
            log.warning("tracker %s gets no samples: %s has no package pyarrow", self.name, sys.executable)
        except (OSError, ValueError, LookupError, TypeError) as error:
            log.warning("tracker %s gets no samples of step %d: %s", self.name, step, reason_of(error))
        return []

    def _wait_for_samples(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Waits until the files with the samples of a step are there, but not once the run has ended."""
        sample_freq = self._run.config.get("tracking", {}).get("sample_freq", -1)
        awaited: list[Sequence[str]] = []  # one of these kinds of files each
        if sample_freq > 0 and step > 0 and step % sample_freq == 0:
            awaited.append(TRAINED)
        if sample_freq > 0 and ACCURACY in metrics:
            awaited.append(VALIDATED)
        deadline_s = time.monotonic() + MAX_WAIT_FOR_SAMPLES_S
        for kinds in awaited:
            while not any(rollouts_file(self._run.folder, kind, step).exists() for kind in kinds):
                if time.monotonic() > deadline_s or self._is_ending.wait(POLL_INTERVAL_S):
                    return

    def _finish(self) -> None:
        """Sends report.png to the tracker if the file has changed since it was sent, and ends the connection."""
        report = self._run.folder / "report.png"
        if self._cursor.step >= 0 and report.exists():
            sha256 = hashlib.sha256(read_plain(report)).hexdigest()
            if sha256 != self._cursor.report:
                self._tracker = self._tracker or self._connected()
                self._tracker.log_report(self._cursor.step, report)
                self._move(report=sha256)
        if self._tracker is not None:
            self._tracker.close(has_failed=self._has_failed())
        self.is_done = True

    def _has_failed(self) -> bool:
        """Returns True if the run has failed: summary.json says so, or was not written after the last step."""
        summary = self._run.folder / "summary.json"
        lines = self._run.folder / METRICS_FILE
        if not summary.exists() or summary.stat().st_mtime_ns < lines.stat().st_mtime_ns:
            return True
        return json.loads(read_plain(summary)).get("exit_reason") in ("failed", "bad_input")

    def _drop(self, error: Exception) -> None:
        """Drops the tracker's connection after an error, and logs the first failure of an outage."""
        self._tracker = None
        if not self._is_failing:
            self._is_failing = True
            sentence = "tracker %s: %s; the run goes on, and missing steps are sent later"
            log.warning(sentence, self.name, reason_of(error))
            log.debug("tracker %s", self.name, exc_info=error)
