"""A feed sends every step once and in order, also after failures of the run, the tracker or the feed."""

from __future__ import annotations

import errno
import json
import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from controller.tracking.trackers import feed
from controller.tracking.trackers.feed import Feed
from controller.tracking.trackers.protocol import Run
from splitppo.run_folder.samples import rollouts_file
from splitppo.run_folder.step_file import METRICS_FILE, StepFile
from tests.support.groups import wait_until
from tests.support.recorded import write_samples


@dataclass
class FakeServer:
    """A tracker's server: what it holds, and what it does to its clients."""

    can_say_last_step: bool = False
    can_rewind: bool = False
    errors: list[Exception] = field(default_factory=list)  # raised by the next calls, one each
    steps: list[tuple[int, Mapping[str, float]]] = field(default_factory=list)
    samples: dict[int, Sequence[Any]] = field(default_factory=dict)
    reports: list[tuple[int, bytes]] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)
    num_connections: int = 0

    @property
    def numbers(self) -> list[int]:
        return [step for step, _ in self.steps]

    def answer(self) -> None:
        if self.errors:
            raise self.errors.pop(0)

    def connect(self, name: str, run: Run, sent_step: int) -> FakeTracker:
        self.answer()
        self.num_connections += 1
        return FakeTracker(self)


class FakeTracker:
    def __init__(self, server: FakeServer) -> None:
        self._server = server
        self.last_step = max(server.numbers, default=-1) if server.can_say_last_step else None

    def log(self, step: int, metrics: Mapping[str, float], samples: Sequence[Sequence[Any]]) -> None:
        self._server.answer()
        self._server.steps.append((step, metrics))
        if samples:
            self._server.samples[step] = samples

    def log_report(self, step: int, report: Path) -> None:
        self._server.answer()
        self._server.reports.append((step, report.read_bytes()))

    def rewind(self) -> bool:
        if self._server.can_rewind:
            self._server.steps.clear()
        return self._server.can_rewind

    def close(self, *, has_failed: bool) -> None:
        self._server.ends.append("failed" if has_failed else "ended")


class FakeRunFolder:
    """A run that writes steps, and feeds of it."""

    def __init__(self, path: Path, server: FakeServer) -> None:
        self.path = path
        self.server = server
        self.run = Run("0" * 16, "name", "project", path, {})
        self.restart(-1)

    def restart(self, restored_step: int) -> None:
        self.metrics = StepFile(self.path / METRICS_FILE, restored_step)

    def write(self, *steps: int, **values: float) -> None:
        for step in steps:
            self.metrics.write(step, {"a": float(step), **values})

    def feed(self, is_ending: threading.Event | None = None) -> Feed:
        """A feed of a run that has ended, unless it is told otherwise."""
        if is_ending is None:
            (is_ending := threading.Event()).set()
        return Feed("fake", self.run, self.server.connect, is_ending)

    def send(self) -> None:
        self.feed().run()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeRunFolder:
    monkeypatch.setattr(feed, "FIRST_PAUSE_S", 0.01)
    return FakeRunFolder(tmp_path, FakeServer())


# What is sent.


def test_every_step_is_sent_once_in_order_with_its_finite_metrics(folder: FakeRunFolder) -> None:
    folder.write(0, 1, b=float("nan"))
    folder.send()
    assert folder.server.steps == [(0, {"a": 0.0}), (1, {"a": 1.0})]
    assert folder.server.ends == ["failed"]  # no summary: the controller was killed


def test_the_samples_of_a_step_go_with_it(folder: FakeRunFolder) -> None:
    write_samples(
        folder.path, "val", 2, ("letters", "sort ba", "ab", "ab", 0.1), ("letters", "sort dc", None, "cd", 1.0)
    )
    write_samples(folder.path, "train", 2, ("letters", "sort fe", "ef", "ef", 1.0))
    write_samples(folder.path, "train", 3)
    folder.write(1, 2, 3)
    folder.send()
    assert folder.server.samples == {
        2: [["train", "letters", "sort fe", "ef", "ef", 1.0], ["val", "letters", "sort ba", "ab", "ab", 0.1]]
    }


def test_samples_that_are_written_after_the_line_of_their_step_are_waited_for(folder: FakeRunFolder) -> None:
    folder.run = replace(folder.run, config={"tracking": {"sample_freq": 2}})
    is_ending = threading.Event()
    thread = threading.Thread(target=folder.feed(is_ending).run)
    thread.start()
    try:
        folder.write(1, 2)
        wait_until(lambda: 1 in folder.server.numbers, 10.0, "step 1")
        assert 2 not in folder.server.numbers
        write_samples(folder.path, "train", 2, ("letters", "sort fe", "ef", "ef", 1.0))
        wait_until(lambda: 2 in folder.server.numbers, 10.0, "step 2")
    finally:
        is_ending.set()
        thread.join(10.0)
    assert [*folder.server.samples] == [2]


def test_a_file_of_responses_that_cannot_be_read_keeps_no_tracker_from_its_steps(folder: FakeRunFolder) -> None:
    write_samples(folder.path, "train", 2)
    rollouts_file(folder.path, "train", 2).write_bytes(b"PAR1 torn")
    folder.write(1, 2)
    folder.send()
    assert folder.server.numbers == [1, 2]
    assert folder.server.samples == {}


def test_the_report_is_sent_once_each_time_it_was_drawn(folder: FakeRunFolder) -> None:
    folder.write(1)
    for picture in (b"one", b"one", b"two"):
        (folder.path / "report.png").write_bytes(picture)
        folder.send()
    assert folder.server.reports == [(1, b"one"), (1, b"two")]


@pytest.mark.parametrize(
    ("reason", "end"), [("completed", "ended"), ("interrupted", "ended"), ("failed", "failed"), ("bad_input", "failed")]
)
def test_the_tracker_hears_how_the_run_ended(folder: FakeRunFolder, reason: str, end: str) -> None:
    folder.write(1)
    (folder.path / "summary.json").write_text(json.dumps({"exit_reason": reason}))
    folder.send()
    assert folder.server.ends == [end]


def test_steps_are_sent_while_the_run_goes_on(folder: FakeRunFolder) -> None:
    is_ending = threading.Event()
    thread = threading.Thread(target=folder.feed(is_ending).run)
    thread.start()
    try:
        for step in (1, 2):
            folder.write(step)
            wait_until(lambda step=step: step in folder.server.numbers, 10.0, f"step {step}")
    finally:
        is_ending.set()
        thread.join(10.0)
    assert folder.server.numbers == [1, 2]
    assert folder.server.num_connections == 1


def test_a_run_without_a_step_makes_no_connection(folder: FakeRunFolder) -> None:
    folder.send()
    assert folder.server.num_connections == 0


# A run that goes on, or back.


def test_a_run_that_goes_on_sends_what_is_new(folder: FakeRunFolder) -> None:
    for steps in ((0, 1), (2, 3)):
        folder.write(*steps)
        folder.send()
    assert folder.server.numbers == [0, 1, 2, 3]


def test_steps_that_a_run_repeats_are_not_sent_again(folder: FakeRunFolder) -> None:
    folder.write(1, 2, 3)
    folder.send()
    folder.restart(1)
    folder.write(2, 3, 4)
    folder.send()
    assert folder.server.numbers == [1, 2, 3, 4]


def test_a_tracker_that_can_take_steps_back_shows_them_as_the_run_has_them_now(folder: FakeRunFolder) -> None:
    folder.server.can_rewind = True
    folder.write(1, 2, 3)
    folder.send()
    folder.restart(1)
    folder.write(2, b=7.0)
    folder.send()
    assert folder.server.steps == [(1, {"a": 1.0}), (2, {"a": 2.0, "b": 7.0})]


@pytest.mark.parametrize("can_say_last_step", [False, True])
def test_a_run_that_goes_back_while_it_is_fed_leaves_no_step_out(
    folder: FakeRunFolder, *, can_say_last_step: bool
) -> None:
    folder.server.can_say_last_step = can_say_last_step
    is_ending = threading.Event()
    thread = threading.Thread(target=folder.feed(is_ending).run)
    thread.start()
    try:
        folder.write(1, 2, 3)
        wait_until(lambda: 3 in folder.server.numbers, 10.0, "step 3")
        folder.restart(1)
        folder.write(2, 3, 4)
        wait_until(lambda: 4 in folder.server.numbers, 10.0, "step 4")
    finally:
        is_ending.set()
        thread.join(10.0)
    assert folder.server.numbers == [1, 2, 3, 4]


# What was sent, and who knows it.


def test_a_server_that_lost_steps_gets_them_again(folder: FakeRunFolder) -> None:
    folder.server.can_say_last_step = True
    folder.write(1, 2, 3)
    folder.send()
    del folder.server.steps[1:]  # e.g. a client that was killed before it had uploaded them
    folder.send()
    assert folder.server.numbers == [1, 2, 3]


def test_a_step_that_arrived_although_its_call_failed_is_not_sent_twice(folder: FakeRunFolder) -> None:
    folder.server.can_say_last_step = True
    folder.write(1, 2)
    folder.server.steps.append((1, {"a": 1.0}))  # and then the connection broke
    folder.send()
    assert folder.server.numbers == [1, 2]


def test_a_position_that_cannot_be_read_is_the_beginning(folder: FakeRunFolder) -> None:
    (folder.path / "trackers").mkdir()
    (folder.path / "trackers" / "fake.json").write_text('{"step": 1, "in')
    folder.write(1)
    folder.send()
    assert folder.server.numbers == [1]


# Trackers that fail.


@pytest.mark.promise("trackers")
def test_nothing_lacks_after_an_outage_and_one_warning_tells_of_it(
    folder: FakeRunFolder, caplog: pytest.LogCaptureFixture
) -> None:
    folder.write(1, 2, 3)
    folder.server.errors = [ConnectionError("refused"), TimeoutError("slow"), ValueError("odd\nanswer")]
    with caplog.at_level(logging.INFO):
        folder.send()
    assert folder.server.numbers == [1, 2, 3]
    assert [record.getMessage() for record in caplog.records] == [
        "tracker fake: refused; the run goes on, and missing steps are sent later",
        "tracker fake is back, and has every step up to 3",
    ]


def test_a_failing_report_is_sent_again_without_the_steps(folder: FakeRunFolder) -> None:
    folder.write(1)
    (folder.path / "report.png").write_bytes(b"png")
    folder.send()
    (folder.path / "report.png").write_bytes(b"png2")
    folder.server.errors = [ConnectionError("at connecting"), ConnectionError("at the report")]
    folder.send()
    assert folder.server.numbers == [1]
    assert folder.server.reports == [(1, b"png"), (1, b"png2")]


def test_a_full_disk_is_not_waited_for_at_the_end(folder: FakeRunFolder) -> None:
    folder.write(1)
    folder.server.errors = [OSError(errno.ENOSPC, "No space left on device")]
    feed = folder.feed()
    feed.run()
    assert not feed.is_done
