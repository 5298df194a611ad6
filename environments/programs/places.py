"""Bounds how many programs live at a time: a program that only waits for the policy makes room for another one."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager


class Place:
    """The place of a program that lives; `leave` asks the program to end and to be started again later."""

    def __init__(self, leave: Callable[[], None]) -> None:
        self.leave = leave
        self.is_idle = False
        self.is_leaving = False


class Places:
    """A number of places; who wants one waits in line.

    While somebody waits, programs that are idle, because they wait for the policy, are asked to leave, one for each who
    waits. One that works keeps its place: it will end, take too long, or ask the policy.
    """

    def __init__(self, num_places: int) -> None:
        self._num_free = num_places
        self._taken: dict[Place, None] = {}  # in the order in which they were taken
        self._waiting: deque[asyncio.Future[None]] = deque()

    @asynccontextmanager
    async def place(self, leave: Callable[[], None]) -> AsyncIterator[Place]:
        """Waits for a place, and gives it to a `with` block."""
        await self._wait()
        place = Place(leave)
        self._taken[place] = None
        try:
            yield place
        finally:
            del self._taken[place]
            self._num_free += 1
            self._let_in()

    def set_idle(self, place: Place, *, is_idle: bool) -> None:
        """Notes whether the program at a place waits for the policy."""
        place.is_idle = is_idle
        self._ask_to_leave()

    async def _wait(self) -> None:
        """Waits in line until a place is free, and takes it."""
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        self._let_in()
        self._ask_to_leave()
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # it has just been let in
                self._num_free += 1
            self._waiting = deque(other for other in self._waiting if other is not turn)
            self._let_in()
            raise

    def _let_in(self) -> None:
        while self._num_free and self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():  # it may be cancelled, and not have noticed yet
                self._num_free -= 1
                turn.set_result(None)

    def _ask_to_leave(self) -> None:
        num_leaving = sum(place.is_leaving for place in self._taken)
        idle = [place for place in self._taken if place.is_idle and not place.is_leaving]
        for place in idle[: max(0, len(self._waiting) - num_leaving)]:
            place.is_leaving = True
            place.leave()
