"""An event loop whose clock jumps to the next timer instead of waiting for it, and devices that work in its time."""

import asyncio
import selectors
from collections import defaultdict
from collections.abc import Callable, Set
from contextlib import suppress
from typing import Any, TypeVar, TypeVarTuple

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_DONE_S = 1e-9  # what rounding may leave of work


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop in which hours of `asyncio.sleep` take milliseconds, and everything happens at its exact time.

    Tasks may wait for each other and for timers, and for nothing outside. A function that is given to a thread is
    called at once: in virtual time it takes none.
    """

    def __init__(self) -> None:
        self._now_s = 0.0
        super().__init__(_JumpingSelector(self._jump))

    def time(self) -> float:
        """Returns the virtual time, in seconds since the loop was made."""
        return self._now_s

    def _jump(self, seconds: float) -> None:
        self._now_s += seconds

    def run_in_executor(
        self,
        executor: Any,  # noqa: ARG002 - of the loop
        func: Callable[[*Ts], T],
        *args: *Ts,
    ) -> "asyncio.Future[T]":
        """Calls the function, and returns a future that has its result already."""
        future: asyncio.Future[T] = self.create_future()
        future.set_result(func(*args))
        return future


class _JumpingSelector(selectors.SelectSelector):
    """A selector that never waits: instead the clock jumps by the time for which it was to wait."""

    def __init__(self, jump: Callable[[float], None]) -> None:
        super().__init__()
        self._jump = jump

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Returns what is ready by now; see `selectors.BaseSelector.select`.

        Raises:
            RuntimeError: there is no timer, so that nothing will ever happen.
        """
        events = super().select(0)
        if not events and timeout is None:
            raise RuntimeError("no timer is left: every task waits for another one")
        if not events and timeout:
            self._jump(timeout)
        return events


class Devices:
    """Pools of devices. Each works on one command at a time, in the order in which the commands arrive."""

    def __init__(self, *, slowed: Set[str] = frozenset(), slowdown: float = 1.0) -> None:
        """Work of a pool in `slowed` takes `slowdown` times as long while another one of them works, too."""
        self._slowed = slowed
        self._slowdown = slowdown
        self._turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._working: Set[str] = frozenset()  # of `slowed`
        self._has_changed = asyncio.Event()
        self._busy: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)  # start and end by pool

    async def work(self, pool: str, *pieces_s: float, on_piece: Callable[[int], None] = lambda _: None) -> None:
        """Carries out one command in a pool: pieces of work of so many seconds.

        `on_piece` is called with the number of each piece, from 1, when the piece is done.
        """
        clock = asyncio.get_running_loop().time
        async with self._turns[pool]:
            started_s = clock()
            self._change(self._working | ({pool} & self._slowed))
            for number, seconds in enumerate(pieces_s, start=1):
                await self._work(pool, seconds)
                on_piece(number)
            self._change(self._working - {pool})
            self._busy[pool].append((started_s, clock()))

    def busy_s(self, pool: str, from_s: float, to_s: float) -> float:
        """Returns for how many seconds of a span of time a pool has worked."""
        return sum(max(0.0, min(end_s, to_s) - max(start_s, from_s)) for start_s, end_s in self._busy[pool])

    def _change(self, working: Set[str]) -> None:
        self._working = working
        self._has_changed.set()
        self._has_changed = asyncio.Event()

    async def _work(self, pool: str, left_s: float) -> None:
        """Works off `left_s` seconds of work of one pool, slower while another slowed pool works, too.

        It waits until the work is done or until a pool begins or ends its own, and then goes on at the new speed.
        """
        clock = asyncio.get_running_loop().time
        while left_s > _DONE_S:
            is_slowed = pool in self._working and len(self._working) > 1
            factor = self._slowdown if is_slowed else 1.0
            began_s = clock()
            with suppress(TimeoutError):
                async with asyncio.timeout(left_s * factor):
                    await self._has_changed.wait()
            left_s -= (clock() - began_s) / factor
