"""Stores the batches of a service by slot (kind and step), from the first put until the step is committed."""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from services.runtime.state.command_call import StoredReply
from splitppo.batch import Batch, held_bytes, join_parts
from splitppo.rpc.errors import Busy, InvalidArgument, LimitExceeded, NotFound, WrongState
from splitppo.v1 import batch_pb2

MAX_EVALUATION_SLOTS = 4
MAX_PARTS = 1024


@dataclass(frozen=True)
class _Kind:
    """The rules of one kind of slots.

    Attributes:
        max_slots: so many there may be; a new one replaces the oldest. None: one for each step that has room.
        has_parts: its rows may come in parts.
        of_committed_step: its rows belong to the committed step or the next one; else to the next two.
    """

    name: str
    max_slots: int | None = None
    has_parts: bool = False
    of_committed_step: bool = False


_KINDS: Mapping[batch_pb2.SlotKind, _Kind] = {
    batch_pb2.SLOT_KIND_EXPERIENCE: _Kind("experience", has_parts=True),
    batch_pb2.SLOT_KIND_EVALUATION: _Kind("evaluation", MAX_EVALUATION_SLOTS, of_committed_step=True),
    batch_pb2.SLOT_KIND_CANDIDATES: _Kind("candidates", 1),
    batch_pb2.SLOT_KIND_GREEDY: _Kind("greedy", 1),
    batch_pb2.SLOT_KIND_SHARE: _Kind("share", has_parts=True),
}
# There are few commands on one slot; a command whose reply was dropped is computed again.
_MAX_REPLIES = 64


class _Key(NamedTuple):
    kind: batch_pb2.SlotKind
    step: int
    part: int = 0


@dataclass
class _Entry:
    rows: Batch
    # Replies of the commands that have written to the slot since the last put, by `CommandCall.reply_key`.
    replies: dict[str, StoredReply] = field(default_factory=dict)


class BatchStore:
    """The batches of rank 0, by slot. Thread-safe: the gRPC thread puts and gets, the main thread does the rest.

    There is room for two steps (with `run.schedule: overlap` the step after next arrives while the next one is still
    being trained), and as many slots of a kind as its `_Kind` says.

    Slots of some kinds may come in parts, 1, 2, ... Until something is put to the whole (part 0), the whole has the
    columns that all parts have, and each row is where the column `places` of its part says. The first put to the whole
    replaces the parts.

    In a group that never commits a step (`committed_step` is None) there is room for one step: a put to another step
    drops what was there.

    Args:
        max_bytes: limit for the batches that are stored or are being received (services.max_held_bytes).
    """

    def __init__(self, max_bytes: float = float("inf")) -> None:
        self._max_bytes = max_bytes
        self._coming_bytes = 0
        self._entries: dict[_Key, _Entry] = {}
        self._lock = threading.Lock()

    @contextmanager
    def reserved(self, num_bytes: int) -> Iterator[None]:
        """Reserves this many bytes of the store for a batch that is being received while the `with` block runs.

        Raises:
            LimitExceeded: the batch is over the limit by itself.
            Busy: there may be room once other batches are gone.
        """
        if num_bytes > self._max_bytes:
            raise LimitExceeded(
                f"a batch of {num_bytes} bytes is over the limit of {self._max_bytes} (services.max_held_bytes)"
            )
        with self._lock:
            taken = self._coming_bytes + held_bytes(entry.rows for entry in self._entries.values())
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
        """Raises InvalidArgument for an impossible slot, WrongState if the slot's step is over or too far ahead.

        Two steps have room at a time: the next one and that after it, for evaluation the committed one and the next. A
        role without a committed step takes any.
        """
        kind = _KINDS.get(slot.kind)
        if kind is None:
            raise InvalidArgument(f"unknown slot kind {slot.kind}")
        if kind.has_parts and not 0 <= slot.part <= MAX_PARTS:
            raise InvalidArgument(f"there is no {describe(slot)}: expected a part from 0 to {MAX_PARTS}")
        first = 0 if kind.of_committed_step else 1
        if committed_step is None:
            if slot.step < first:
                raise InvalidArgument(f"there is no {describe(slot)}: its step must be {first} or more")
            return
        steps = (committed_step + first, committed_step + first + 1)
        if slot.step not in steps:
            raise WrongState(f"no room for {describe(slot)}: steps {steps[0]} and {steps[1]} are taken now")

    def put(self, slot: batch_pb2.Slot, batch: Batch, committed_step: int | None) -> None:
        """Stores a batch in a new slot, or adds the batch's columns to the rows of an existing slot; all or nothing.

        What a part shares with other parts of its slot is stored once.

        Raises:
            InvalidArgument, WrongState: see `check`.
            ValueError: the rows are not those of the slot.
        """
        self.check(slot, committed_step)
        key = _key(slot)
        with self._lock:
            if committed_step is None:
                self._entries = {other: entry for other, entry in self._entries.items() if other.step == key.step}
            batch = batch.stored_with(self._siblings(key))
            present = self._find(key)
            rows = present.rows.merge(batch) if present else batch
            if may_have_parts(key) and key not in self._entries:
                self._drop_parts(key)
            self._entries[key] = _Entry(rows)
            self._drop_oldest(key.kind)

    def get(self, slot: batch_pb2.Slot) -> Batch:
        """Returns the rows of a slot; NotFound if the slot is empty, or was dropped when its step was committed."""
        with self._lock:
            return self._entry(slot).rows

    def absorb(self, slot: batch_pb2.Slot, columns: Batch, reply_key: str, reply: StoredReply) -> None:
        """Stores a command's result in a slot: adds columns of the same rows, or replaces the rows by k results each.

        What the result shares with the rows stays where it is stored.

        Raises:
            NotFound: as for `get`.
            ValueError: the columns do not fit.
        """
        with self._lock:
            entry = self._entry(slot)
            columns = columns.stored_with([entry.rows])
            entry.rows = entry.rows.merge(columns) if columns.num_rows == entry.rows.num_rows else columns
            entry.replies[reply_key] = reply
            if len(entry.replies) > _MAX_REPLIES:
                del entry.replies[next(iter(entry.replies))]
            self._entries[_key(slot)] = entry

    def add_part(self, slot: batch_pb2.Slot, part: int, rows: Batch) -> None:
        """Stores finished rows of a running command as one part of the command's slot; NotFound as for `get`.

        What they share with the rows of the slot stays where it is stored.
        """
        with self._lock:
            whole = self._entry(slot).rows
            self._entries[_Key(slot.kind, slot.step, part)] = _Entry(rows.stored_with([whole]))

    def drop_parts(self, slot: batch_pb2.Slot) -> None:
        """Drops all parts of a slot, because the command that made the parts was cancelled or is run again."""
        with self._lock:
            self._drop_parts(_key(slot))

    def reply_of(self, slot: batch_pb2.Slot, reply_key: str) -> StoredReply | None:
        """Returns the stored reply of a command whose result is still in the slot; None without such a reply."""
        with self._lock:
            entry = self._entries.get(_key(slot))
            return entry.replies.get(reply_key) if entry else None

    def commit(self, step: int, result: Batch | None = None) -> None:
        """Drops the slots of a committed step and of earlier steps; evaluation slots of the committed step stay.

        The experience slot of the step then has the columns of `result`, if there are any, until the next commit.
        """
        with self._lock:
            for key in list(self._entries):
                if key.step < step or (key.step == step and not _KINDS[key.kind].of_committed_step):
                    del self._entries[key]
            if result is not None:
                self._entries[_Key(batch_pb2.SLOT_KIND_EXPERIENCE, step)] = _Entry(result)

    def clear(self) -> None:
        with self._lock:
            self._entries.clear()

    def slots(self) -> list[batch_pb2.Slot]:
        """Returns all slots of the store that have rows, oldest first."""
        with self._lock:
            return [batch_pb2.Slot(**key._asdict()) for key in self._entries]

    def _drop_oldest(self, kind: batch_pb2.SlotKind) -> None:
        """Drops the oldest slots of a kind of which there are too many."""
        max_slots = _KINDS[kind].max_slots
        if max_slots is not None:
            for oldest in [key for key in self._entries if key.kind == kind][:-max_slots]:
                del self._entries[oldest]

    def _entry(self, slot: batch_pb2.Slot) -> _Entry:
        entry = self._find(_key(slot))
        if entry is None:
            raise NotFound(f"there is no {describe(slot)}: it was never put, or its step is over; put it again")
        return entry

    def _find(self, key: _Key) -> _Entry | None:
        """Returns the entry of a slot, made of the slot's joined parts if only parts were put; None without rows."""
        parts = self._parts(key) if may_have_parts(key) else []
        if key in self._entries or not parts:
            return self._entries.get(key)
        if parts != list(range(1, len(parts) + 1)):
            raise WrongState(f"the {describe(key)} has gaps: only its parts {', '.join(map(str, parts))} were put")
        return _Entry(join_parts([self._entries[key._replace(part=part)].rows for part in parts]))

    def _parts(self, whole: _Key) -> list[int]:
        return sorted(key.part for key in self._entries if key[:2] == whole[:2] and key.part)

    def _siblings(self, key: _Key) -> list[Batch]:
        """Returns the rows of a slot and of its other parts, if its kind has any."""
        if not _KINDS[key.kind].has_parts:
            return []
        return [entry.rows for other, entry in self._entries.items() if other[:2] == key[:2]]

    def _drop_parts(self, whole: _Key) -> None:
        for part in self._parts(whole):
            del self._entries[whole._replace(part=part)]


def describe(slot: batch_pb2.Slot | _Key) -> str:
    """Returns a slot as text for error sentences, e.g. "experience slot of step 3, part 1"."""
    kind = _KINDS.get(slot.kind, _Kind(f"unknown ({slot.kind})"))
    part = f", part {slot.part}" if slot.part else ""
    return f"{kind.name} slot of step {slot.step}{part}"


def may_have_parts(slot: batch_pb2.Slot | _Key) -> bool:
    """Returns True for a whole slot (part 0) of a kind whose rows may come in parts."""
    kind = _KINDS.get(slot.kind)
    return kind is not None and kind.has_parts and slot.part == 0


def _key(slot: batch_pb2.Slot) -> _Key:
    return _Key(slot.kind, slot.step, slot.part)
