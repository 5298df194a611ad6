"""Calls at the same time, supervised work, and work in the background: the error that is raised."""

from __future__ import annotations

import asyncio

import pytest

from controller.workers.concurrency import BackgroundTask, gather_calls, run_watched


async def test_the_first_error_of_nested_groups_is_raised_as_it_is() -> None:
    leaf = ValueError("leaf")

    async def fail_in_groups() -> None:
        inner = ExceptionGroup("inner", [leaf, KeyError("second")])
        raise ExceptionGroup("outer", [inner, OSError("third")])

    with pytest.raises(ValueError, match="leaf") as failed:
        await gather_calls(fail_in_groups())
    assert failed.value is leaf


async def never() -> None:
    await asyncio.Event().wait()


async def test_work_that_ends_also_ends_the_watch() -> None:
    begun, cancelled = asyncio.Event(), asyncio.Event()

    async def watch() -> None:
        begun.set()
        try:
            await never()
        finally:
            cancelled.set()

    await run_watched(begun.wait(), watch())
    assert cancelled.is_set()


async def test_an_error_of_the_watch_ends_the_work_and_is_raised() -> None:
    cancelled = asyncio.Event()

    async def watch() -> None:
        raise RuntimeError("a group has ended")

    async def work() -> None:
        try:
            await never()
        finally:
            cancelled.set()

    with pytest.raises(RuntimeError, match="a group has ended"):
        await run_watched(work(), watch(), grace_s=0.0)
    assert cancelled.is_set()


async def test_an_error_of_the_work_itself_comes_before_that_of_the_watch() -> None:
    watched = asyncio.Event()

    async def watch() -> None:
        watched.set()
        raise RuntimeError("a group has ended")

    async def work() -> None:
        await watched.wait()
        for _ in range(10):  # the watch has raised meanwhile
            await asyncio.sleep(0)
        raise ValueError("rank 1 has failed")

    with pytest.raises(ValueError, match="rank 1 has failed"):
        await run_watched(work(), watch())


# Work in the background.


async def fail() -> None:
    raise KeyError("the cause")


async def end_soon() -> None:
    await asyncio.sleep(0)


def must_not_follow() -> None:
    pytest.fail("the work has not succeeded")


async def test_all_who_join_get_the_error_of_the_work() -> None:
    task = BackgroundTask()
    task.start(fail)
    task.then(must_not_follow)
    errors = await asyncio.gather(task.join(), task.join(), return_exceptions=True)
    assert [str(error) for error in errors] == ["'the cause'"] * 2
    await task.join()


async def test_what_follows_is_called_once_and_as_soon_as_the_work_has_ended_whether_somebody_waits_or_not() -> None:
    called = []
    task = BackgroundTask()
    task.then(lambda: called.append("without work"))
    task.start(end_soon)
    task.then(lambda: called.append("during the work"))
    assert called == ["without work"]
    for _ in range(3):
        await asyncio.sleep(0)
    assert called == ["without work", "during the work"]
    task.then(lambda: called.append("after it"))
    await task.join()
    assert called == ["without work", "during the work", "after it"]


async def test_an_error_of_what_follows_is_raised_to_who_joins() -> None:
    task = BackgroundTask()
    task.start(end_soon)
    task.then(lambda: {}["the cause"])
    with pytest.raises(KeyError, match="the cause"):
        await task.join()


async def test_after_a_failure_and_after_abandoned_work_nothing_follows() -> None:
    task = BackgroundTask()
    task.start(end_soon)
    task.then(must_not_follow)
    await task.abandon()
    task.start(fail)
    with pytest.raises(KeyError, match="the cause"):
        await task.wait()
    task.then(must_not_follow)


async def test_who_waits_gets_the_error_and_leaves_the_work_to_be_joined() -> None:
    task = BackgroundTask()
    await task.wait()
    task.start(fail)
    for wait in (task.wait, task.wait, task.join):
        with pytest.raises(KeyError, match="the cause"):
            await wait()
    await task.join()


async def test_a_check_raises_only_what_is_known_already() -> None:
    task = BackgroundTask()
    task.check()
    task.start(fail)
    task.check()
    await asyncio.sleep(0)
    with pytest.raises(KeyError, match="the cause"):
        task.check()
    task.check()
