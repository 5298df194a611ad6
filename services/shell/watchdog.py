"""Nothing waits for ever: a rank that is frozen, or stuck in a command or at the start, ends its group, by name.

A thread of each rank leaves a sign of life in the group's store, with what the main thread is doing. Rank 0 watches all
ranks, every other one watches rank 0 and itself. The limits are `services.start_timeout_s` until a rank is ready, and
`services.progress_timeout_s` for the silence of a command and of a process. In a hang all ranks wait for the one that
is stuck, so the one to name is whoever shows no sign of life, else whoever has been silent longest.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from torch.distributed.distributed_c10d import Store

from services.shell.activity import Activity, Doing
from services.shell.failure import FailureWatch, RankHangs
from splitppo.rpc.errors import Place

log = logging.getLogger(__name__)

_FAILED = 1
_KEY = "splitppo/alive/{}"
_MAX_INTERVAL_S = 1.0
# A sign of life that is this many intervals, and seconds, old is missing.
_NUM_MISSED = 3
_MIN_MISSED_S = 2.0


@contextmanager
def start_limit(limit_s: float) -> Iterator[None]:
    """Ends this process if the block, in which the ranks find each other, takes longer."""

    def give_up() -> None:
        log.error("the ranks have not found each other within %g s (services.start_timeout_s)", limit_s)
        logging.shutdown()
        os._exit(_FAILED)

    timer = threading.Timer(limit_s, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@dataclass
class _Sign:
    """The last sign of life of another rank, and when it came, on this rank's clock."""

    number: int
    doing: Doing
    seen_at: float


class Watchdog:
    """One per rank.

    Args:
        rank, world_size: of this rank.
        store: a client of the group's store that no other thread uses.
        activity: of this rank's main thread.
        failure: ends the group.
        limit_s: longest time without a sign of life of a process.
        clock: seconds that never go back.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        store: Store,
        activity: Activity,
        failure: FailureWatch,
        *,
        limit_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rank = rank
        self._store = store
        self._activity = activity
        self._failure = failure
        self._limit_s = limit_s
        self._clock = clock
        starting = Doing(Place(phase="start"))
        self._signs = {
            other: _Sign(0, starting, clock()) for other in (range(1, world_size) if rank == 0 else range(1))
        }
        self._num_sent = 0
        self._interval_s = min(_MAX_INTERVAL_S, limit_s / 5)
        self._missed_s = max(_NUM_MISSED * self._interval_s, _MIN_MISSED_S)

    def start(self) -> None:
        """Starts the watching thread; it ends with `FailureWatch.stop`."""
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def _watch(self) -> None:
        try:
            self.look()
            while not self._failure.wait_stopped(self._interval_s):
                self.look()
        except RuntimeError:
            log.warning("the group's store is gone")  # the failure watch sees it, too

    def look(self) -> None:
        """Leaves a sign of life and looks at those of the others. Ends the group if one of them hangs."""
        mine = self._activity.now()
        self._send(mine)
        for rank in self._signs:
            self._receive(rank)
        if self._hangs(mine):
            rank, doing, what = self._culprit(mine)
            progress = f", its last progress was {doing.progress}" if doing.progress else ""
            self._failure.end_group(RankHangs(f"{what}{progress}"), replace(doing.place, rank=rank))

    def _hangs(self, mine: Doing) -> bool:
        now = self._clock()
        if any(now - sign.seen_at > self._limit_s for sign in self._signs.values()):
            return True
        # Rank 0 sees all ranks and names the right one: the others leave it the first word.
        patience_s = 0.0 if self._rank == 0 else self._missed_s
        return mine.silent_s > mine.limit_s + patience_s

    def _culprit(self, mine: Doing) -> tuple[int, Doing, str]:
        """Which rank it is, what it was doing, and what is wrong with it."""
        now = self._clock()
        rank, sign = min(self._signs.items(), key=lambda item: item[1].seen_at, default=(self._rank, None))
        if sign is not None and now - sign.seen_at > min(self._missed_s, self._limit_s):
            # Its last sign may be older than the command that all ranks are in.
            its, own = sign.doing.place, mine.place
            doing = sign.doing if own.method and (its.method, its.step) == (own.method, own.step) else mine
            return rank, doing, f"it has given no sign of life for {now - sign.seen_at:.0f} s"
        everyone = {self._rank: mine, **{rank: sign.doing for rank, sign in self._signs.items()}}
        rank = max(everyone, key=lambda one: everyone[one].silent_s)
        return rank, everyone[rank], f"no progress for {everyone[rank].silent_s:.0f} s"

    def _send(self, doing: Doing) -> None:
        self._num_sent += 1
        place = doing.place
        sign: dict[str, Any] = {
            "number": self._num_sent,
            "method": place.method,
            "step": place.step,
            "phase": place.phase,
            "progress": doing.progress,
            "silent_s": doing.silent_s,
        }
        self._store.set(_KEY.format(self._rank), json.dumps(sign))

    def _receive(self, rank: int) -> None:
        key = _KEY.format(rank)
        if not self._store.check([key]):
            return
        sign = json.loads(self._store.get(key))
        if self._signs[rank].number != sign["number"]:
            place = Place(method=sign["method"], step=sign["step"], phase=sign["phase"])
            doing = Doing(place, sign["progress"], self._limit_s, sign["silent_s"])
            self._signs[rank] = _Sign(sign["number"], doing, self._clock())
