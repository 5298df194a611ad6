"""The batch store of a service: batches by slot, from the first put until their step is committed, and their bytes."""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from services.runtime.state.command_call import StoredReply
from splitppo.batch import Batch, join_parts
from splitppo.rpc.errors import Busy, InvalidArgument, LimitExceeded, NotFound, WrongState
from splitppo.v1 import batch_pb2

MAX_EVALUATION_SLOTS = 4
MAX_PARTS = 1024
# By kind: how its slots are called, and of how many the oldest makes room for a new one.
_KINDS: Mapping[batch_pb2.SlotKind, tuple[str, int | None]] = {
    batch_pb2.SLOT_KIND_EXPERIENCE: ("experience", None),
    batch_pb2.SLOT_KIND_EVALUATION: ("evaluation", MAX_EVALUATION_SLOTS),
    batch_pb2.SLOT_KIND_CANDIDATES: ("candidates", 1),
    batch_pb2.SLOT_KIND_GREEDY: ("greedy", 1),
}
# Commands on one slot are few; a reply that is pushed out is computed again.
_MAX_REPLIES = 64


class _Key(NamedTuple):
    kind: batch_pb2.SlotKind
    step: int
    part: int = 0

    @property
    def may_have_parts(self) -> bool:
        return self.kind == batch_pb2.SLOT_KIND_EXPERIENCE and self.part == 0


@dataclass
class _Entry:
    rows: Batch
    # Replies of the commands that have written to the slot since the last put.
    replies: dict[str, StoredReply] = field(default_factory=dict)


class BatchStore:
    """Rank 0's batches. Thread-safe: puts and gets come from the gRPC thread, the rest from the main thread.

    There is room for the experience of the next two steps (under `overlap` the step after next arrives while the
    next one is still being trained), for a few evaluation batches, and for one of candidates and of greedy rollouts
    each; of these kinds the oldest makes room for a new one.
    Experience may come in parts, 1, 2, ...; as long as nothing was put to the whole (part 0), the whole is what the
    parts have in common, each row where its part's column `places` says. The first put to the whole takes their place.

    Where no step is ever committed (`committed_step` is None), there is room for one step: a put to another one drops
    what was there.

    Args:
        max_bytes: of batches that are held and on their way (services.max_held_bytes).
    """

    def __init__(self, max_bytes: float = float("inf")) -> None:
        self._max_bytes = max_bytes
        self._coming_bytes = 0
        self._entries: dict[_Key, _Entry] = {}
        self._lock = threading.Lock()

    @contextmanager
    def reserved(self, num_bytes: int) -> Iterator[None]:
        """Within the block there is room for a batch that is on its way.

        Raises:
            LimitExceeded: there never will be.
            Busy: there may be once other batches are gone.
        """
        if num_bytes > self._max_bytes:
            raise LimitExceeded(
                f"a batch of {num_bytes} bytes is over the limit of {self._max_bytes} (services.max_held_bytes)"
            )
        with self._lock:
            taken = self._coming_bytes + sum(entry.rows.held_bytes for entry in self._entries.values())
            if taken + num_bytes > self._max_bytes:
                raise Busy(
                    f"no room for a batch of {num_bytes} bytes: {taken} of {self._max_bytes} bytes are taken"
                    " (services.max_held_bytes)"
                )
            self._coming_bytes += num_bytes
        try:
            yield
        finally:
            with self._lock:
                self._coming_bytes -= num_bytes

    def check(self, slot: batch_pb2.Slot, committed_step: int | None) -> None:
        """Refuses a slot that makes no sense (InvalidArgument), or whose step is over or too far ahead (WrongState)."""
        if slot.kind not in _KINDS:
            raise InvalidArgument(f"unknown slot kind {slot.kind}")
        if slot.kind == batch_pb2.SLOT_KIND_EXPERIENCE and not 0 <= slot.part <= MAX_PARTS:
            raise InvalidArgument(f"an experience slot has parts 0 to {MAX_PARTS}, got {slot.part}")
        first = 0 if slot.kind == batch_pb2.SLOT_KIND_EVALUATION else 1
        if committed_step is None:
            if slot.step < first:
                raise InvalidArgument(f"there is no {describe(slot)}: its step must be {first} or more")
            return
        steps = (committed_step + first, committed_step + first + 1)
        if slot.step not in steps:
            raise WrongState(f"no room for {describe(slot)}: steps {steps[0]} and {steps[1]} are taken now")

    def put(self, slot: batch_pb2.Slot, batch: Batch, committed_step: int | None) -> None:
        """Creates the slot, or adds columns to its rows; all or nothing.

        Raises:
            InvalidArgument, WrongState: see `check`.
            ValueError: the rows are not those of the slot.
        """
        self.check(slot, committed_step)
        key = _key(slot)
        with self._lock:
            if committed_step is None:
                self._entries = {other: entry for other, entry in self._entries.items() if other.step == key.step}
            present = self._find(key)
            rows = present.rows.merge(batch) if present else batch
            if key.may_have_parts and key not in self._entries:
                self._drop_parts(key)
            self._entries[key] = _Entry(rows)
            _, room = _KINDS[key.kind]
            for oldest in [other for other in self._entries if other.kind == key.kind][:-room] if room else ():
                del self._entries[oldest]

    def get(self, slot: batch_pb2.Slot) -> Batch:
        """The rows of a slot; NotFound if nothing was put there, or its step has been committed."""
        with self._lock:
            return self._entry(slot).rows

    def absorb(self, slot: batch_pb2.Slot, columns: Batch, reply_key: str, reply: StoredReply) -> None:
        """Takes what a command made: columns of the same rows are added, a multiple of the rows replaces them.

        Raises:
            NotFound: as for `get`.
            ValueError: the columns do not fit.
        """
        with self._lock:
            entry = self._entry(slot)
            entry.rows = entry.rows.merge(columns) if columns.num_rows == entry.rows.num_rows else columns
            entry.replies[reply_key] = reply
            if len(entry.replies) > _MAX_REPLIES:
                del entry.replies[next(iter(entry.replies))]
            self._entries[_key(slot)] = entry

    def add_part(self, slot: batch_pb2.Slot, part: int, rows: Batch) -> None:
        """Keeps rows that a running command has finished beside its slot, as a part of it; NotFound as for `get`."""
        with self._lock:
            self._entry(slot)
            self._entries[_Key(slot.kind, slot.step, part)] = _Entry(rows)

    def drop_parts(self, slot: batch_pb2.Slot) -> None:
        """Drops the parts of a whole slot: the command that made them was given up."""
        with self._lock:
            self._drop_parts(_key(slot))

    def reply_of(self, slot: batch_pb2.Slot, reply_key: str) -> StoredReply | None:
        """The reply of a command whose work is still in the slot."""
        with self._lock:
            entry = self._entries.get(_key(slot))
            return entry.replies.get(reply_key) if entry else None

    def commit(self, step: int) -> None:
        """Drops what belongs to this step or an earlier one; an evaluation of this step stays."""
        with self._lock:
            for key in list(self._entries):
                if key.step < step or (key.step == step and key.kind != batch_pb2.SLOT_KIND_EVALUATION):
                    del self._entries[key]

    def clear(self) -> None:
        with self._lock:
            self._entries.clear()

    def slots(self) -> list[batch_pb2.Slot]:
        """Returns the slots that hold something, oldest first."""
        with self._lock:
            return [batch_pb2.Slot(**key._asdict()) for key in self._entries]

    def _entry(self, slot: batch_pb2.Slot) -> _Entry:
        entry = self._find(_key(slot))
        if entry is None:
            raise NotFound(f"there is no {describe(slot)}: it was never put, or its step is over; put it again")
        return entry

    def _find(self, key: _Key) -> _Entry | None:
        """Returns what was put there; for a whole that was never put, its parts joined."""
        if key in self._entries or not key.may_have_parts or not (parts := self._parts(key)):
            return self._entries.get(key)
        if parts != list(range(1, len(parts) + 1)):
            raise WrongState(f"the {describe(key)} has gaps: only its parts {', '.join(map(str, parts))} were put")
        return _Entry(join_parts([self._entries[key._replace(part=part)].rows for part in parts]))

    def _parts(self, whole: _Key) -> list[int]:
        return sorted(key.part for key in self._entries if key[:2] == whole[:2] and key.part)

    def _drop_parts(self, whole: _Key) -> None:
        for part in self._parts(whole):
            del self._entries[whole._replace(part=part)]


def describe(slot: batch_pb2.Slot | _Key) -> str:
    """Returns the name of a slot for people."""
    kind, _ = _KINDS.get(slot.kind, (f"unknown ({slot.kind})", None))
    part = f", part {slot.part}" if slot.part else ""
    return f"{kind} slot of step {slot.step}{part}"


def _key(slot: batch_pb2.Slot) -> _Key:
    return _Key(slot.kind, slot.step, slot.part)
