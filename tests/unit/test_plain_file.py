"""What is in the place of a file of a run folder: nobody waits for it, and a sentence says what is there."""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from controller.run.folder import is_held
from controller.tracking.trackers.feed import Cursor
from controller.workers.template import read_log
from environments.output import bounded_output
from environments.record import Record
from rewards.judge.answers import Answers
from splitppo.config import ConfigError, load_config
from splitppo.file_lock import any_lock
from splitppo.plain_file import NoPlainFile, open_plain, read_plain
from splitppo.run_folder.append_log import AppendLog
from splitppo.run_folder.end_reason import read_end_reason, read_first_end
from splitppo.run_folder.epoch import newest_epoch, read_epoch
from splitppo.run_folder.events import append_event
from splitppo.run_folder.logs import LogFile
from splitppo.run_folder.processes import Group, read_processes
from splitppo.run_folder.samples import read_samples
from splitppo.run_folder.spans import Span
from splitppo.run_folder.summary import Summary
from splitppo.run_folder.trace import Trace, read_trace

MODES = ("rb", "ab", "a+b", "r+b", "wb")


@pytest.fixture(autouse=True)
def never_waits() -> Iterator[None]:
    """Ends a test that waits for a pipe."""

    def fail(*_: object) -> None:
        raise AssertionError("it waits")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def make(path: Path, kind: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero")
    return path


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["pipe", "folder", "device"])
def test_what_is_no_file_is_named_at_once(tmp_path: Path, kind: str, mode: str) -> None:
    path = make(tmp_path / "there", kind)
    for name in (path, tmp_path / "link"):
        with pytest.raises(NoPlainFile, match=rf"^{name}: expected a file, got a {kind}$"):
            open_plain(name, mode).close()
        if name == path:
            (tmp_path / "link").symlink_to(path)


def test_a_file_is_opened_as_by_open(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with pytest.raises(FileNotFoundError):
        read_plain(path)
    for content in (b"one", b" two"):
        with open_plain(path, "ab") as file:
            file.write(content)
    assert read_plain(path) == b"one two"


REFUSING: dict[str, Callable[[Path], Any]] = {
    "trace.json": lambda folder: read_trace(folder / "trace.json"),
    "controller.epoch": lambda folder: read_epoch(folder / "controller.epoch"),
    "config.yaml": lambda folder: load_config(folder / "config.yaml", is_stored=True),
    "events.jsonl": lambda folder: append_event(folder, {"kind": "end"}),
    "logs/controller_0.log": lambda folder: LogFile(folder / "logs" / "controller_0.log"),
    "logs/environments.log": lambda folder: bounded_output(folder / "logs" / "environments.log"),
    "episodes/3.jsonl": lambda folder: Record(folder / "episodes").at_step(3, ["1"]),
    "judge.jsonl": lambda folder: Answers(folder / "judge.jsonl").open(),
    "lock": lambda folder: any_lock([folder / "lock"]).__enter__(),
    "rollouts/train/3.parquet": lambda folder: read_samples(folder, 3),
}
IGNORING: dict[str, Callable[[Path], Any]] = {
    "summary.json": lambda folder: Summary.read(folder / "summary.json"),
    "controller.epoch": lambda folder: newest_epoch(folder / "controller.epoch"),
    "processes.json": lambda folder: read_processes(folder, "actor") or None,
    "services/actor.json": lambda folder: Group.announced(folder, "actor"),
    "services/actor.failure.json": lambda folder: read_end_reason(folder, "actor", "1"),
    "services/actor.end.json": lambda folder: read_first_end(folder / "services" / "actor.end.json"),
    "controller.lock": lambda folder: is_held(folder) or None,
    "log": lambda folder: read_log(folder / "log") or None,
    "trackers/tensorboard.json": lambda folder: (
        None if Cursor.load(folder / "trackers" / "tensorboard.json") == Cursor() else 1
    ),
}


@pytest.mark.parametrize("kind", ["pipe", "folder"])
@pytest.mark.parametrize("name", REFUSING)
def test_a_reader_or_writer_that_needs_the_file_says_what_is_there(tmp_path: Path, name: str, kind: str) -> None:
    path = make(tmp_path / name, kind)
    with pytest.raises((OSError, ConfigError), match=rf"{path}: expected a file, got a {kind}$"):
        REFUSING[name](tmp_path)


@pytest.mark.parametrize("kind", ["pipe", "folder"])
@pytest.mark.parametrize("name", IGNORING)
def test_a_reader_that_can_do_without_goes_on(tmp_path: Path, name: str, kind: str) -> None:
    make(tmp_path / name, kind)
    assert IGNORING[name](tmp_path) is None


def test_log_files_get_whole_lines_also_of_broken_text(tmp_path: Path) -> None:
    handler = LogFile(tmp_path / "a.log")
    for text in ("é", "\udc80"):
        handler.handle(logging.makeLogRecord({"msg": text}))
    handler.close()
    assert (tmp_path / "a.log").read_text(encoding="utf-8") == "é\n\\udc80\n"


@contextmanager
def full_at(num_bytes: int) -> Iterator[None]:
    """Lets every write beyond a size fail without the name of a file, as a full disk does."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_failed_write_names_its_file(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    trace = Trace(path)
    log = AppendLog(tmp_path / "events.jsonl")
    with full_at(path.stat().st_size + 8):
        with pytest.raises(OSError, match=rf"File too large: '{path}'"):
            trace.add([Span("actor", "gen", 1, 0.0, 1.0)])
        with pytest.raises(OSError, match=rf"File too large: '{log.path}'"):
            log.append(json.dumps("x" * 4096).encode() + b"\n")
