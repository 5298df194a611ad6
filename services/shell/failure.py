"""When a rank fails: the group ends, and the caller is told which rank it was and why.

A rank that fails inside a collective section would leave the others waiting in it. So it writes what happened to the
group's store and exits; a watcher on every rank sees that, or sees a process of its node gone, and leaves as well. Rank
0 answers ABORTED before it goes. The same thread tells a rank that a command is cancelled, which is no failure.
"""

from __future__ import annotations

import json
import logging
import os
import re
import select
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import NoReturn

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from services.shell.context import RankContext
from services.shell.logs import FILE_ONLY
from splitppo.manifest import DamagedCheckpoint
from splitppo.rpc.errors import PeerDied, Place, WireError
from splitppo.v1 import worker_pb2

log = logging.getLogger(__name__)

_FAILURE_KEY = "splitppo/failure"
_CANCELLED_KEY = "splitppo/cancelled/{}"  # the number of the order
_POLL_INTERVAL_S = 0.5
# How long rank 0 looks for the cause, and how long the others wait for rank 0 to answer its callers.
_CAUSE_WAIT_S = 2.0
_FOLLOWER_GRACE_S = 5.0
_PEER_LOSS = re.compile(r"gloo/|nccl|connection (closed|reset|refused)|broken pipe", re.IGNORECASE)


class RankHangs(RuntimeError):
    """A rank is frozen or stuck; the message says since when."""


class FailureWatch:
    """Watches over the ranks of one group; one on each rank.

    Args:
        store: a client of the group's store that no other thread uses.
        processes: all ranks.
        same_node: ranks whose processes this one can watch.
    """

    def __init__(
        self,
        context: RankContext,
        store: Store,
        processes: Sequence[worker_pb2.Process],
        same_node: Sequence[int],
    ) -> None:
        self._context = context
        self._store = store
        self._store_lock = threading.Lock()
        self._pids = {process.rank: process.pid for process in processes}
        self._watched = {_pidfd(self._pids[rank]): rank for rank in same_node if rank != context.rank}
        self._agent = _pidfd(os.getppid())
        self._stopped = threading.Event()
        self._ending = threading.Lock()
        self._cancellable: int | None = None
        self._cancelled: int | None = None
        self._on_failure: Callable[[WireError], None] = lambda _: None

    def start(self) -> None:
        """Starts the watching thread."""
        threading.Thread(target=self._watch, name="failure-watch", daemon=True).start()

    def on_failure(self, callback: Callable[[WireError], None]) -> None:
        """Rank 0: `callback` answers the callers; the process exits when it returns."""
        self._on_failure = callback

    def cancel(self, order: int) -> None:
        """Rank 0, any thread: tells the other ranks to give up the command of an order. Does not wait."""
        threading.Thread(target=self._set, args=(_CANCELLED_KEY.format(order), "1"), daemon=True).start()

    @contextmanager
    def cancellable(self, order: int) -> Iterator[None]:
        """Every other rank: within the block, `is_cancelled` soon knows of a `cancel`."""
        self._cancellable = order
        try:
            yield
        finally:
            self._cancellable = None

    def is_cancelled(self, order: int) -> bool:
        """Whether the command of an order is cancelled, as of the last look into the store."""
        return self._cancelled == order

    def stop(self) -> None:
        """The group leaves in good order: processes that end are no failure any more."""
        self._stopped.set()

    def wait_stopped(self, timeout_s: float) -> bool:
        """Waits until `stop`; False if it does not come in time."""
        return self._stopped.wait(timeout_s)

    def end_group(self, error: BaseException | None, place: Place) -> NoReturn:
        """Ends this rank, and with it the group. Never returns.

        Args:
            error: what happened here; None if it happened to another rank.
            place: method, step and phase that this rank was in; with a rank if it is another one that fails.
        """
        self._ending.acquire()  # a second thread that comes here waits for the exit
        try:
            self._tell(error, place)
            logging.shutdown()
        finally:
            os._exit(1)  # whatever kept it from telling: the others wait for its end

    def _tell(self, error: BaseException | None, place: Place) -> None:
        """Says what happened: to the store and the log, on rank 0 to the callers."""
        if error is not None and not is_peer_loss(error):
            hangs = isinstance(error, RankHangs)
            self._record(f"it hangs: {error}" if hangs else f"{type(error).__name__}: {error}", place)
            log.error("failed in %s: %s", place, error, exc_info=None if hangs else error)
        if self._context.rank == 0:
            cause = self._cause(error, place)
            log.error("the group ends: %s", cause)
            self._on_failure(cause)
        elif error is None or is_peer_loss(error):
            log.error(
                "another rank has failed: leaving (%s)", " ".join(str(error or "").split())[:200], extra=FILE_ONLY
            )
            self._set(f"splitppo/leaving/{self._context.rank}", "1")

    def _record(self, error: str, place: Place) -> None:
        """The first rank that fails by itself is the cause."""
        rank = self._context.rank if place.rank is None else place.rank
        record = {"rank": rank, "phase": str(replace(place, rank=None)), "error": error}
        try:
            with self._store_lock:
                self._store.compare_set(_FAILURE_KEY, "", json.dumps(record))
        except RuntimeError:
            log.warning("the group's store is gone")

    def _set(self, key: str, value: str) -> None:
        try:
            with self._store_lock:
                self._store.set(key, value)
        except RuntimeError:
            log.warning("the group's store is gone")

    def _has(self, key: str) -> bool:
        with self._store_lock:
            return bool(self._store.check([key]))

    def _cause(self, error: BaseException | None, place: Place) -> WireError:
        """Which rank it was and why, as far as can be found out within a moment."""
        role = Place(role=self._context.role_name, method=place.method, step=place.step)
        deadline = time.monotonic() + _CAUSE_WAIT_S
        try:
            while True:
                if self._has(_FAILURE_KEY):
                    with self._store_lock:
                        record = json.loads(self._store.get(_FAILURE_KEY))
                    where = f" in {record['phase']}" if record["phase"] else ""
                    return PeerDied(
                        f"rank {record['rank']} failed{where}: {record['error']}; the group ends",
                        Place(rank=record["rank"]).or_else(role),
                    )
                for rank in self._dead_ranks():
                    if not self._has(f"splitppo/leaving/{rank}"):
                        return PeerDied(
                            f"a peer rank died: rank {rank}, pid {self._pids[rank]}; the group ends",
                            Place(rank=rank).or_else(role),
                        )
                if time.monotonic() >= deadline:
                    break
                self._stopped.wait(0.05)
        except RuntimeError:
            log.warning("the group's store is gone")
        detail = f" ({' '.join(str(error).split())[:200]})" if error else ""
        return PeerDied(f"a peer rank died or cannot be reached{detail}; the group ends", role)

    def _dead_ranks(self) -> list[int]:
        poll = select.poll()
        for fd in self._watched:
            poll.register(fd, select.POLLIN)
        return sorted(self._watched[fd] for fd, _ in poll.poll(0))

    def _watch(self) -> None:
        """Ends this rank when another one has failed or died, or when torchrun's agent has."""
        poll = select.poll()
        for fd in (*self._watched, self._agent):
            poll.register(fd, select.POLLIN)
        try:
            while not self._stopped.is_set():
                if poll.poll(_POLL_INTERVAL_S * 1000) or self._has(_FAILURE_KEY):
                    break
                order = self._cancellable
                if order is not None and self._has(_CANCELLED_KEY.format(order)):
                    self._cancelled = order
        except RuntimeError:
            log.warning("the group's store is gone")
        if self._context.rank != 0:
            self._stopped.wait(_FOLLOWER_GRACE_S)
        if not self._stopped.is_set():
            self.end_group(None, Place())


def is_peer_loss(error: BaseException) -> bool:
    """Whether this is what a collective raises when another rank has gone."""
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and bool(_PEER_LOSS.search(str(error)))


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, on the host or on a device."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if isinstance(error, torch.AcceleratorError):
        return "out of memory" in str(error)
    return isinstance(error, RuntimeError) and "not enough memory" in str(error)


def is_broken_device(error: BaseException) -> bool:
    """Whether a device failed (an illegal access, a lost GPU): whatever this process does on it from now on fails."""
    return isinstance(error, torch.AcceleratorError) and not is_out_of_memory(error)


def cannot_go_on(error: BaseException, *, num_ranks: int, repairs: bool) -> bool:
    """Whether the group has to end because a command failed in the engine.

    Other ranks would wait for the one that failed. A group of one ends where only a new process helps: its device is
    broken, or a load, which brings others back, failed by itself.

    Args:
        error: the command's.
        num_ranks: of the group.
        repairs: the command is a load; its input may be at fault (WireError, ValueError, OSError).
    """
    if num_ranks > 1 or is_broken_device(error):
        return True
    return repairs and not isinstance(error, WireError | ValueError | OSError)


def cannot_save(error: BaseException, *, num_ranks: int) -> bool:
    """Whether the group has to end because its ranks could not finish a save together.

    Where storage failed they can go on, and the error says so; any other one is what a rank hears that has lost
    another one meanwhile, or that the others do not know of.
    """
    return num_ranks > 1 and not isinstance(error, OSError | WireError | DamagedCheckpoint)


class StepCounter:
    """Counts the optimizer steps of this process: an update that fails before its first one has changed no weight."""

    def __init__(self) -> None:
        self.num_steps = 0
        register_optimizer_step_pre_hook(self._count)

    def _count(self, _: Optimizer, __: object, ___: object) -> None:
        self.num_steps += 1


def _pidfd(pid: int) -> int:
    """A descriptor that becomes readable when the process ends."""
    return os.pidfd_open(pid)
