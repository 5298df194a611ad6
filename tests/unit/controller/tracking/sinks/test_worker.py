"""The thread that records: jobs in their order, failures that reach nobody, a memory that does not grow."""

from __future__ import annotations

import logging
import threading

import pytest

from controller.tracking.sinks.worker import RecordWorker


def nothing() -> None:
    pass


def test_jobs_are_done_in_their_order_by_another_thread() -> None:
    done: list[tuple[int, bool]] = []
    worker = RecordWorker(nothing, lambda _: None)
    for number in range(20):
        worker.submit("job", lambda number=number: done.append((number, threading.current_thread().daemon)))  # type: ignore[misc]
    worker.close(timeout_s=30.0)
    assert done == [(number, True) for number in range(20)]


def test_a_failure_is_one_warning_and_what_follows_is_done(caplog: pytest.LogCaptureFixture) -> None:
    done, failures = list[str](), list[str]()
    worker = RecordWorker(nothing, failures.append)

    def fail() -> None:
        raise OSError(28, "No space left on device")

    for number in (1, 2):
        worker.submit(f"step {number}", fail)
        worker.submit("job", lambda: done.append("done"))
    with caplog.at_level(logging.WARNING):
        worker.close(timeout_s=30.0)
    assert done == ["done", "done"]
    assert failures == [f"step {number}: OSError: [Errno 28] No space left on device" for number in (1, 2)]
    assert len(caplog.records) == 1
    assert "step 1 could not be recorded" in caplog.text


def test_steps_are_left_out_while_an_earlier_one_does_not_end() -> None:
    go_on, done, failures = threading.Event(), list[int](), list[str]()
    worker = RecordWorker(nothing, failures.append)
    worker.submit("slow", lambda: (go_on.wait(30.0), None)[1])
    for number in range(100):
        worker.submit(f"step {number}", lambda number=number: done.append(number), is_large=True)  # type: ignore[misc]
    go_on.set()
    worker.close(timeout_s=30.0)
    assert len(done) == 4
    assert done == list(range(len(done)))
    assert len(failures) == 100 - len(done)


def test_a_thread_that_hangs_delays_the_end_only_so_long() -> None:
    go_on = threading.Event()
    worker = RecordWorker(nothing, lambda _: None)
    worker.submit("hangs", lambda: (go_on.wait(60.0), None)[1])
    worker.close(timeout_s=0.01)
    assert not go_on.is_set()
    go_on.set()


def test_without_a_job_there_is_nothing_to_wait_for() -> None:
    RecordWorker(nothing, lambda _: None).close(timeout_s=30.0)
