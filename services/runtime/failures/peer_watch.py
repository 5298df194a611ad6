"""Ends the whole group when one rank fails, and tells the caller which rank failed and why.

If a rank fails inside a collective, the others would wait in it. So the rank writes what happened to the group's store
and exits. A watcher on every rank reads that, or sees that a process of its node has ended, and exits, too. On a node
without rank 0 the watcher first writes to the store what it has seen, because no other node sees it. Rank 0 answers its
callers with ABORTED before it exits. Rank 0 also uses the store to tell ranks that a command is cancelled.
"""

import logging
import os
import select
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import NoReturn

from torch.distributed.distributed_c10d import Store

from services.runtime.context import Members, RankContext
from services.runtime.failures.error_policy import is_peer_loss
from services.runtime.failures.record import Failure, read_failure, read_text, write_failure
from splitppo.logs import FILE_ONLY
from splitppo.rpc.errors import PeerDied, Place, WireError
from splitppo.run_folder.end_reason import BAD_INPUT_EXIT
from splitppo.user_file import describe

log = logging.getLogger(__name__)

_CANCELLED_KEY = "splitppo/cancelled/{}"  # the number of the order
_LEAVING_KEY = "splitppo/leaving/{}"  # the rank
_BAD_INPUT_KEY = "splitppo/bad_input"  # the sentence that the user gets
_POLL_INTERVAL_S = 0.5
# How long rank 0 looks for the cause, and how long the others wait for rank 0 to answer its callers.
_CAUSE_WAIT_S = 2.0
_FOLLOWER_GRACE_S = 5.0
_END_WAIT_S = 0.2  # the connections of a process that is killed end a moment before it does


class RankHangs(RuntimeError):
    """A rank of the group is frozen or makes no progress; the message says for how many seconds."""


class PeerWatch:
    """Watches the other ranks of a group for failures, and ends the group; every rank has one PeerWatch.

    Args:
        store: a client of the group's store that no other thread uses.
        members: all ranks of the group; this rank watches the processes of its own node.

    Attributes:
        stopped: set by `stop`.
        on_failure: on rank 0, answers the callers; the process exits when it returns.
    """

    def __init__(self, context: RankContext, store: Store, members: Members) -> None:
        self._context = context
        self._store = store
        self._store_lock = threading.Lock()
        self._members = members
        others = [rank for rank in members.same_node if rank != context.rank]
        self._watched = {os.pidfd_open(members.processes[rank].pid): rank for rank in others}
        self._agent = os.pidfd_open(os.getppid())
        self.stopped = threading.Event()
        self._ending = threading.Lock()
        self._cancelled = (-1, False, 0.0)  # an order, whether it is cancelled, when that was looked up
        self._bad_input = ""  # the sentence about bad input that another rank prints
        self.on_failure: Callable[[WireError], None] = lambda _: None

    def start(self) -> None:
        threading.Thread(target=self._watch, name="failure-watch", daemon=True).start()

    def cancel(self, order: int) -> None:
        """Tells the other ranks to stop the command with this order number; called on rank 0, returns at once."""
        threading.Thread(target=self._set, args=(_CANCELLED_KEY.format(order),), daemon=True).start()

    def is_cancelled(self, order: int) -> bool:
        """Returns True if rank 0 cancelled the command with this order number; other ranks learn it within 0.5 s."""
        last_order, is_cancelled, looked_up_at = self._cancelled
        now = time.monotonic()
        if last_order != order or now - looked_up_at >= _POLL_INTERVAL_S:
            is_cancelled = bool(self._get(_CANCELLED_KEY.format(order)))
            self._cancelled = (order, is_cancelled, now)
        return is_cancelled

    def stop(self) -> None:
        """Stops watching the other ranks: from now on a process that ends does not count as a failure."""
        self.stopped.set()

    def leave(self, bad_input: Exception) -> None:
        """Tells the other ranks that this rank ends because of bad input, and stops watching them.

        One rank prints the sentence for the user. The others then end without an error of their own on stderr.
        """
        self.stop()
        self._set(_BAD_INPUT_KEY, _one_line(bad_input))

    def end_group(self, error: BaseException | None, place: Place) -> NoReturn:
        """Reports an error to the store, the log and (on rank 0) the callers; then ends this process and so the group.

        Args:
            error: the failure of this rank; None if another rank has failed.
            place: method, step and phase of this rank; it also has a rank if that other rank has failed.
        """
        self._ending.acquire()  # a second thread that comes here waits for the exit
        try:
            self._tell(error, place)
            logging.shutdown()
        finally:
            # Also if telling has failed, because the others wait for the end of this process.
            os._exit(BAD_INPUT_EXIT if self._bad_input else 1)

    def _tell(self, error: BaseException | None, place: Place) -> None:
        """Writes the failure of a rank to the group's store and the log; rank 0 also answers the callers."""
        if error is not None and not is_peer_loss(error):
            hangs = isinstance(error, RankHangs)
            self._record(f"it hangs: {error}" if hangs else describe(error), place)
            log.error("failed in %s: %s", place, error, exc_info=None if hangs else error)
        if self._context.rank == 0:
            cause = self._cause(error, place)
            log.error("the group ends: %s", cause, extra=FILE_ONLY if self._bad_input else None)
            self.on_failure(cause)
        elif error is None or is_peer_loss(error):
            log.error("another rank has failed: leaving (%s)", _one_line(error), extra=FILE_ONLY)
            self._set(_LEAVING_KEY.format(self._context.rank))

    def _record(self, error: str, place: Place) -> None:
        """Writes a rank's failure to the store unless one is there: the first rank to fail by itself is the cause."""
        rank = self._context.rank if place.rank is None else place.rank
        failure = Failure(rank, error, str(replace(place, rank=None)))
        with _warning_if_store_is_gone(), self._store_lock:
            write_failure(self._store, failure)

    def _set(self, key: str, value: str = "1") -> None:
        with _warning_if_store_is_gone(), self._store_lock:
            self._store.set(key, value)

    def _get(self, key: str) -> str:
        with self._store_lock:
            return read_text(self._store, key)

    def _cause(self, error: BaseException | None, place: Place) -> WireError:
        """Waits up to _CAUSE_WAIT_S until the cause of the group's failure is known; returns it as an error.

        Without a known cause it is a PeerDied: torchrun has ended, or a peer, which is named if its address stands in
        the message of `error`.
        """
        role = Place(role=self._context.role_name, method=place.method, step=place.step)
        deadline = time.monotonic() + _CAUSE_WAIT_S
        with _warning_if_store_is_gone():
            while (cause := self._known_cause()) is None and time.monotonic() < deadline:
                self.stopped.wait(0.05)
            if cause is not None:
                return cause.at(role)
        if self._agent_has_ended(_END_WAIT_S):
            return PeerDied("torchrun has ended; the group ends", role)
        sentence = _one_line(error)
        away = [rank for rank, address in self._members.addresses.items() if f"[{address}]" in sentence and rank != 0]
        where = f", perhaps {' and '.join(map(self._named, away))}" if away else ""
        detail = f" ({sentence})" if sentence else ""
        return PeerDied(f"a peer rank died or cannot be reached{where}{detail}; the group ends", role)

    def _agent_has_ended(self, wait_s: float = 0.0) -> bool:
        return bool(_poll((self._agent,)).poll(1000 * wait_s))

    def _named(self, rank: int) -> str:
        return f"rank {rank} on {self._members.processes[rank].host}" if self._members.addresses else f"rank {rank}"

    def _known_cause(self) -> WireError | None:
        """Makes the error about the rank that failed (its record in the store) or died; None if there is neither."""
        self._bad_input = self._get(_BAD_INPUT_KEY)
        if self._bad_input:
            return PeerDied(f"{self._bad_input}; the group ends", Place())
        if failure := self._failure():
            where = f" in {failure.phase}" if failure.phase else ""
            failed = f"{self._named(failure.rank)} failed{where}: {failure.error}; the group ends"
            return PeerDied(failed, Place(rank=failure.rank))
        if (rank := self._silent_death()) is not None:
            pid = self._members.processes[rank].pid
            return PeerDied(f"a peer rank died: {self._named(rank)}, pid {pid}; the group ends", Place(rank=rank))
        return None

    def _failure(self) -> Failure | None:
        with self._store_lock:
            return read_failure(self._store)

    def _silent_death(self) -> int | None:
        """Returns the lowest rank of this node that died by itself, not because another rank failed; else None."""
        gone = sorted(self._watched[fd] for fd, _ in _poll(self._watched).poll(0))
        return next((rank for rank in gone if not self._get(_LEAVING_KEY.format(rank))), None)

    def _watch(self) -> None:
        """Waits until another rank has failed or died, or torchrun's agent has ended, and then ends this rank.

        On a node without rank 0 it tells the other nodes first. Then rank 0 gets time to answer its callers: it ends at
        once, all others some seconds later.
        """
        poll = _poll((*self._watched, self._agent))
        with _warning_if_store_is_gone():
            while not (self.stopped.is_set() or poll.poll(_POLL_INTERVAL_S * 1000) or self._failure()):
                pass
            if not self.stopped.is_set() and 0 not in self._members.same_node:
                self._tell_other_nodes()
        if self._context.rank != 0:
            self.stopped.wait(_FOLLOWER_GRACE_S)
        if not self.stopped.is_set():
            self.end_group(None, Place())

    def _tell_other_nodes(self) -> None:
        """Records in the store that a process of this node has ended, which other nodes cannot see."""
        if self._agent_has_ended():
            self._record("torchrun has ended there", Place())
        elif (rank := self._silent_death()) is not None:
            self._record(f"it died, pid {self._members.processes[rank].pid}", Place(rank=rank))


@contextmanager
def _warning_if_store_is_gone() -> Iterator[None]:
    """Turns a RuntimeError of the `with` block, which means that the group's store is gone, into a log warning."""
    try:
        yield
    except RuntimeError:
        log.warning("the group's store is gone")


def _poll(pidfds: Iterable[int]) -> select.poll:
    """Makes a poll object that reports which of these processes (given as pidfds) have ended."""
    poll = select.poll()
    for fd in pidfds:
        poll.register(fd, select.POLLIN)
    return poll


def _one_line(error: BaseException | None) -> str:
    return " ".join(str(error or "").split())[:200]
