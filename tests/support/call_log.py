"""The log of the calls of fake services, which tests can hold up, or make fail."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import numpy as np

from splitppo.rpc.errors import Place, Unavailable

DEADLINE_S = 20.0

T = TypeVar("T")
Hook = Callable[[int], Awaitable[None]]
Stream = Callable[[], Awaitable[None]]


class CallLog:
    """The log of the begin and the end of each call, in order: ("begin", "critic.update", step), ..."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str, int]] = []
        self.hooks: dict[str, Hook] = {}
        self._changed = asyncio.Condition()

    async def run(
        self, name: str, step: int, command_queue: asyncio.Lock, work: Callable[[], T], stream: Stream | None = None
    ) -> T:
        """Runs a call: logs its begin, waits in the command queue and for its hook, works, and logs its end."""
        await self._note("begin", name, step)
        async with command_queue:
            await asyncio.sleep(0)
            if name in self.hooks:
                await self.hooks[name](step)
            if stream is not None:
                await stream()
            result = work()
        await self._note("end", name, step)
        return result

    async def ready(self, name: str, part: int) -> None:
        """Waits for the hook of a part of a running call, then logs that the part is ready."""
        if name in self.hooks:
            await self.hooks[name](part)
        await self._note("ready", name, part)

    async def until(self, what: str, name: str, step: int) -> None:
        """Waits until an event is in the log."""
        async with asyncio.timeout(DEADLINE_S), self._changed:
            await self._changed.wait_for(lambda: (what, name, step) in self.events)

    def happened(self, what: str, name: str, step: int) -> bool:
        """Returns True if an event is in the log."""
        return (what, name, step) in self.events

    def order(self, *events: tuple[str, str, int]) -> bool:
        """Returns True if these events are in the log, in this order."""
        positions = [self.events.index(event) for event in events]
        return positions == sorted(positions)

    def names(self, step: int | None = None) -> list[str]:
        """Returns the names of the calls, of one step or of all, in the order in which they began."""
        return [name for what, name, of in self.events if what == "begin" and step in (None, of)]

    def most_at_once(self) -> int:
        """Returns the largest number of calls that ran at the same time."""
        running = np.cumsum([{"begin": 1, "ready": 0, "end": -1}[what] for what, _, _ in self.events])
        return int(running.max(initial=0))

    def meet(self, *names: str) -> None:
        """Makes each of these calls wait until all of them run; a schedule that keeps them apart times out."""
        barrier = asyncio.Barrier(len(names))

        async def wait_for_the_others(step: int) -> None:
            async with asyncio.timeout(DEADLINE_S):
                await barrier.wait()

        self.hooks.update(dict.fromkeys(names, wait_for_the_others))

    def fail(self, name: str, error: Exception, *, at_step: int = 1) -> None:
        """Makes the call of this name raise in a step."""

        async def raise_at(step: int) -> None:
            if step == at_step:
                raise error

        self.hooks[name] = raise_at

    def lose(self, role: str, name: str, *, at_step: int = 1) -> None:
        """Makes the call of this name raise in a step, once, because the group of this role is lost."""
        errors = [Unavailable("the group is lost", Place(role=role))]

        async def raise_once(step: int) -> None:
            if step == at_step and errors:
                raise errors.pop()

        self.hooks[name] = raise_once

    def hold(self, name: str, *, at_step: int = 1) -> asyncio.Event:
        """Makes the call of this name wait in a step until the event is set."""
        event = asyncio.Event()

        async def wait(step: int) -> None:
            if step == at_step:
                async with asyncio.timeout(DEADLINE_S):
                    await event.wait()

        self.hooks[name] = wait
        return event

    async def _note(self, what: str, name: str, step: int) -> None:
        self.events.append((what, name, step))
        async with self._changed:
            self._changed.notify_all()
