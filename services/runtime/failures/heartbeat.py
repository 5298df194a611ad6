"""Ends a group in which a rank hangs (frozen, or stuck in a command or at the start), and names that rank.

A thread of each rank writes a heartbeat to the group's store, with what the main thread is doing. Rank 0 watches all
ranks; every other rank watches rank 0 and itself. The limits are `services.start_timeout_s` until a rank is ready, and
`services.progress_timeout_s` for the silence of a command and of a process. In a hang all ranks wait for the rank that
is stuck. So the rank that is named is the one without a heartbeat, else the one that has been silent longest.
"""

import json
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import KW_ONLY, asdict, dataclass, field, replace
from typing import NamedTuple

from torch.distributed.distributed_c10d import Store

from services.runtime.failures.device import DeviceState
from services.runtime.failures.peer_watch import PeerWatch, RankHangs
from services.runtime.failures.record import read_text
from splitppo.rpc.errors import Place

log = logging.getLogger(__name__)

_KEY = "splitppo/alive/{}"
_MAX_INTERVAL_S = 1.0
# A sign of life is missing if the last one is older than this many intervals, and older than this many seconds.
_NUM_MISSED = 3
_MIN_MISSED_S = 2.0


def start_limit(limit_s: float) -> AbstractContextManager[None]:
    """Ends this process if the `with` block, in which the ranks find each other, takes over `limit_s` seconds."""
    return _limit(limit_s, f"the ranks have not found each other within {limit_s:g} s (services.start_timeout_s)")


@contextmanager
def _limit(limit_s: float, missed: str) -> Iterator[None]:
    """Ends this process with code 1 and logs the sentence `missed` if the `with` block takes longer than limit_s."""

    def give_up() -> None:
        log.error("%s", missed)
        logging.shutdown()
        os._exit(1)

    timer = threading.Timer(limit_s, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@dataclass(frozen=True)
class Doing:
    """The work of a rank's main thread at one moment; empty while the thread waits for the next order of rank 0.

    Attributes:
        progress: of the command, e.g. "3 of 8"; empty before the first progress.
        limit_s: the longest time without progress that is allowed now, in seconds.
        silent_s: seconds since the last progress.
    """

    place: Place = field(default_factory=Place)
    progress: str = ""
    limit_s: float = 0.0
    silent_s: float = 0.0


class Activity:
    """Records what a rank's main thread works on, and the time of the thread's last progress. Thread-safe.

    Args:
        start_limit_s: longest time until the rank is ready, in seconds.
        limit_s: longest time between two progress reports of a command, in seconds.
        clock: returns seconds that never go back.
    """

    def __init__(
        self, start_limit_s: float = math.inf, limit_s: float = math.inf, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._limit_s = limit_s
        self._clock = clock
        self._set(Doing(Place(phase="start"), limit_s=start_limit_s))

    def idle(self) -> None:
        """Records that this rank's main thread waits for the next order of rank 0."""
        self._set(None)

    @contextmanager
    def command(self, place: Place) -> Iterator[None]:
        """Records that the rank works on a command during the `with` block; if the block raises, the record stays."""
        self._set(Doing(place, limit_s=self._limit_s))
        yield
        self.idle()

    def progress(self, done: int, total: int, phase: str) -> None:
        doing = self._moment[0] or Doing(limit_s=self._limit_s)
        self._set(replace(doing, place=replace(doing.place, phase=phase), progress=f"{done} of {total}"))

    def now(self) -> Doing:
        doing, since = self._moment
        return Doing() if doing is None else replace(doing, silent_s=self._clock() - since)

    def _set(self, doing: Doing | None) -> None:
        self._moment = (doing, self._clock())  # replaced as a whole: the other thread never sees half of it


class _Sign(NamedTuple):
    """The last heartbeat read from another rank, and when this rank read it, in seconds of this rank's clock."""

    number: int
    doing: Doing
    device: DeviceState
    seen_at: float


class VitalSign(NamedTuple):
    """The last heartbeat of a rank for the doctor's report: the device state, and the heartbeat's age in seconds."""

    device: DeviceState
    silent_s: float


@dataclass
class Heartbeat:
    """Writes the heartbeat of one rank to the group's store, and ends the group if another rank's is missing.

    Attributes:
        store: a client of the group's store that no other thread uses.
        activity: what this rank's main thread works on.
        limit_s: longest time without a heartbeat of a process, in seconds.
        device: reads the name and free memory of this rank's device.
        clock: returns seconds that never go back.
    """

    rank: int
    world_size: int
    store: Store
    activity: Activity
    failure: PeerWatch
    _: KW_ONLY
    limit_s: float
    device: Callable[[], DeviceState] = DeviceState
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        others = range(1, self.world_size) if self.rank == 0 else range(1)
        nothing = Doing(Place(phase="start")), DeviceState(), self.clock()
        self._signs = {other: _Sign(0, *nothing) for other in others}
        self._own_sign = _Sign(0, *nothing)
        self._interval_s = min(_MAX_INTERVAL_S, self.limit_s / 5)
        self._missed_s = max(_NUM_MISSED * self._interval_s, _MIN_MISSED_S)

    def start(self) -> None:
        """Starts the heartbeat thread, which ends after `PeerWatch.stop`."""
        threading.Thread(target=self._watch, name="heartbeat", daemon=True).start()

    def _watch(self) -> None:
        try:
            while not self.failure.stopped.is_set():
                self.look()
                self.failure.stopped.wait(self._interval_s)
        except RuntimeError:
            log.warning("the group's store is gone")  # the failure watch sees it, too

    def look(self) -> None:
        """Writes this rank's heartbeat, reads those of the watched ranks, and ends the group if a rank hangs."""
        mine = self.activity.now()
        self._own_sign = _Sign(self._own_sign.number + 1, mine, self.device(), self.clock())
        sign = {"number": self._own_sign.number, "doing": asdict(mine), "device": asdict(self._own_sign.device)}
        # If the machine with the store cannot be reached, the calls below block without an error.
        missed = f"the group's store has not answered for {self.limit_s:g} s (services.progress_timeout_s)"
        with _limit(self.limit_s, missed):
            self.store.set(_KEY.format(self.rank), json.dumps(sign))
            for rank in self._signs:
                self._receive(rank)
        if self._hangs(mine):
            rank, doing, what = self._culprit(mine)
            progress = f", its last progress was {doing.progress}" if doing.progress else ""
            self.failure.end_group(RankHangs(f"{what}{progress}"), replace(doing.place, rank=rank))

    def vital_signs(self) -> dict[int, VitalSign]:
        """Returns the last heartbeats of the watched ranks and of this rank, by rank; any thread may call it."""
        now = self.clock()
        signs = {self.rank: self._own_sign, **self._signs}
        return {rank: VitalSign(sign.device, now - sign.seen_at) for rank, sign in signs.items()}

    def _hangs(self, mine: Doing) -> bool:
        """Returns True if this rank, or one that it watches, has been silent for too long."""
        now = self.clock()
        # Rank 0 sees all ranks and names the right one: the others give it time to do so.
        limit_s = mine.limit_s + (self._missed_s if self.rank else 0.0)
        return mine.silent_s > limit_s or any(now - sign.seen_at > self.limit_s for sign in self._signs.values())

    def _culprit(self, mine: Doing) -> tuple[int, Doing, str]:
        """Finds the rank that hangs: the one without a heartbeat, else the one that has been silent longest.

        Returns that rank, what it was doing, and the symptom as text for the error.
        """
        oldest = min(self._signs, key=lambda rank: self._signs[rank].seen_at, default=None)
        if oldest is not None:
            age_s = self.clock() - self._signs[oldest].seen_at
            if age_s > min(self._missed_s, self.limit_s):
                doing = _newest_work(self._signs[oldest].doing, mine)
                return oldest, doing, f"it has given no sign of life for {age_s:.0f} s"
        everyone = {self.rank: mine, **{rank: sign.doing for rank, sign in self._signs.items()}}
        rank = max(everyone, key=lambda number: everyone[number].silent_s)
        return rank, everyone[rank], f"no progress for {everyone[rank].silent_s:.0f} s"

    def _receive(self, rank: int) -> None:
        """Takes the newest heartbeat of a rank from the store; the time that counts is that of this rank's clock."""
        if not (text := read_text(self.store, _KEY.format(rank))):
            return
        sign = json.loads(text)
        if self._signs[rank].number != sign["number"]:
            doing = Doing(**{**sign["doing"], "place": Place(**sign["doing"]["place"])})
            self._signs[rank] = _Sign(sign["number"], doing, DeviceState(**sign["device"]), self.clock())


def _newest_work(of_sign: Doing, mine: Doing) -> Doing:
    """Returns what a silent rank was doing when it fell silent: its last sign, or this rank's work if that is newer.

    All ranks run the same commands. So a sign of another command is older than this rank's work, which the silent rank
    has begun as well; a sign of the same one has that rank's own progress.
    """
    is_same = (of_sign.place.method, of_sign.place.step) == (mine.place.method, mine.place.step)
    return of_sign if is_same and mine.place.method else mine
