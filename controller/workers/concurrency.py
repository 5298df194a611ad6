"""Runs asyncio calls together or in the background; errors are raised unwrapped, and no task is left behind."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")


@asynccontextmanager
async def task_group() -> AsyncIterator[asyncio.TaskGroup]:
    """Gives an `asyncio.TaskGroup` whose first error cancels the other tasks and is raised unwrapped."""
    try:
        async with asyncio.TaskGroup() as group:
            yield group
    except BaseExceptionGroup as failures:
        error: BaseException = failures
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from None


async def gather_calls(*calls: Coroutine[Any, Any, Any]) -> list[Any]:
    """Runs coroutines at the same time; returns results in order. The first error cancels the others and is raised."""
    async with task_group() as group:
        tasks = [group.create_task(call) for call in calls]
    return [task.result() for task in tasks]


async def run_watched(work: Coroutine[Any, Any, T], watch: Coroutine[Any, Any, NoReturn], *, grace_s: float = 0.5) -> T:
    """Awaits `work` and returns its result, unless the endless coroutine `watch` raises first, e.g. as a process died.

    After `watch` has raised, `work` has `grace_s` seconds to fail by itself, because the error of `work` says more.
    """
    working = asyncio.create_task(work)
    watching = asyncio.create_task(watch)
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            await asyncio.wait({working}, timeout=grace_s)
        return working.result() if working.done() else watching.result()
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


class BackgroundTask:
    """Runs one coroutine at a time in the background, and raises the coroutine's error when it is joined.

    `timer` makes a context manager that is entered for the time that a caller waits.
    """

    def __init__(self, timer: Callable[[], AbstractContextManager[object]] = nullcontext) -> None:
        self._timer = timer
        self._task: asyncio.Task[None] | None = None
        self._next: Callable[[], None] | None = None

    def start(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Starts a coroutine in the background; an earlier coroutine must have been joined."""
        assert self._task is None
        self._task = asyncio.create_task(self._run(work))

    async def _run(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        await work()
        if follow := self._next:
            self._next = None
            follow()

    def then(self, follow: Callable[[], None]) -> None:
        """Calls `follow` as soon as the coroutine has succeeded: at once if it has, or if there is none.

        It is not called if the coroutine fails or is abandoned. Its own error is raised as the coroutine's would be.
        """
        if self._task is not None and not self._task.done():
            self._next = follow
        elif self._task is None or self._task.exception() is None:
            follow()

    def check(self) -> None:
        """Joins the background coroutine if it has ended, and raises its error; does not wait while it still runs."""
        if self._task is not None and self._task.done():
            self._finish(self._task)

    async def wait(self) -> None:
        """Waits for the background coroutine, which is still to be joined; raises the coroutine's error."""
        if (task := self._task) is not None:
            with self._timer():
                await asyncio.wait([task])
            task.result()

    async def join(self) -> None:
        """Waits for the background coroutine, and raises the coroutine's error, in all callers that wait.

        The coroutine survives the cancellation of a caller.
        """
        if (task := self._task) is not None:
            with self._timer():
                await asyncio.wait([task])
            self._finish(task)

    def _finish(self, task: asyncio.Task[None]) -> None:
        if task is self._task:
            self._task = None
        task.result()

    async def abandon(self) -> None:
        """Cancels the background coroutine, and ignores the coroutine's error."""
        if (task := self._task) is not None:
            self._task = self._next = None
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
