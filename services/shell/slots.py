"""The experience store of a service: batches by slot, from the first put until their step is committed."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from splitppo.batch import Batch, concatenate
from splitppo.rpc.errors import InvalidArgument, NotFound, WrongState
from splitppo.v1 import batch_pb2, worker_pb2

MAX_EVALUATION_SLOTS = 4
MAX_PARTS = 1024
# Commands on one slot are few; a reply that is pushed out is computed again.
_MAX_REPLIES = 64

_Key = tuple[int, int, int]


@dataclass
class _Entry:
    slot: batch_pb2.Slot
    rows: Batch
    # Replies of the commands that have written to the slot since the last put.
    replies: dict[str, worker_pb2.CommandResult] = field(default_factory=dict)


class SlotStore:
    """Rank 0's batches. Thread-safe: puts and gets come from the gRPC thread, the rest from the main thread.

    There is room for the experience of the next two steps (under `overlap` the step after next arrives while the
    next one is still being trained) and for a few evaluation batches, of which the oldest makes room for a new one.
    Experience may come in parts, 1, 2, ...; as long as nothing was put to the whole (part 0), the whole is what the
    parts have in common, one part after the other. The first put to the whole takes their place.
    """

    def __init__(self) -> None:
        self._entries: dict[_Key, _Entry] = {}
        self._lock = threading.Lock()

    def check(self, slot: batch_pb2.Slot, committed_step: int) -> None:
        """Whether a batch may be put there now.

        Raises:
            InvalidArgument: the slot makes no sense.
            WrongState: it belongs to a step that is over or too far ahead.
        """
        if slot.kind == batch_pb2.SLOT_KIND_EXPERIENCE:
            if not 0 <= slot.part <= MAX_PARTS:
                raise InvalidArgument(f"an experience slot has parts 0 to {MAX_PARTS}, got {slot.part}")
            steps = (committed_step + 1, committed_step + 2)
        elif slot.kind == batch_pb2.SLOT_KIND_EVALUATION:
            steps = (committed_step, committed_step + 1)
        else:
            raise InvalidArgument(f"unknown slot kind {slot.kind}")
        if slot.step not in steps:
            raise WrongState(f"no room for {describe(slot)}: steps {steps[0]} and {steps[1]} are taken now")

    def put(self, slot: batch_pb2.Slot, batch: Batch, committed_step: int) -> None:
        """Creates the slot, or adds columns to its rows; all or nothing.

        Raises:
            InvalidArgument, WrongState: see `check`.
            ValueError: the rows are not those of the slot.
        """
        self.check(slot, committed_step)
        with self._lock:
            present = self._find(slot)
            rows = present.rows.merge(batch) if present else batch
            if _is_whole(slot) and _key(slot) not in self._entries:
                self._drop_parts(slot)
            self._entries[_key(slot)] = _Entry(slot, rows)
            self._make_room()

    def get(self, slot: batch_pb2.Slot) -> Batch:
        """The rows of a slot.

        Raises:
            NotFound: nothing was put there, or its step has been committed.
        """
        with self._lock:
            return self._entry(slot).rows

    def absorb(self, slot: batch_pb2.Slot, columns: Batch, reply_key: str, reply: worker_pb2.CommandResult) -> None:
        """Takes what a command made: columns of the same rows are added, a multiple of the rows replaces them.

        Raises:
            NotFound: the slot has gone.
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
        """Keeps rows that a running command has finished beside its slot, as a part of it.

        Raises:
            NotFound: the slot has gone.
        """
        with self._lock:
            self._entry(slot)
            of_part = batch_pb2.Slot(kind=slot.kind, step=slot.step, part=part)
            self._entries[_key(of_part)] = _Entry(of_part, rows)

    def drop_parts(self, slot: batch_pb2.Slot) -> None:
        """Drops the parts of a whole slot: the command that made them was given up."""
        with self._lock:
            self._drop_parts(slot)

    def reply_of(self, slot: batch_pb2.Slot, reply_key: str) -> worker_pb2.CommandResult | None:
        """The reply of a command whose work is still in the slot."""
        with self._lock:
            entry = self._entries.get(_key(slot))
            return entry.replies.get(reply_key) if entry else None

    def commit(self, step: int) -> None:
        """Drops what belongs to this step or an earlier one."""
        with self._lock:
            for key, entry in list(self._entries.items()):
                is_experience = entry.slot.kind == batch_pb2.SLOT_KIND_EXPERIENCE
                if entry.slot.step < step or (is_experience and entry.slot.step == step):
                    del self._entries[key]

    def clear(self) -> None:
        """Drops everything."""
        with self._lock:
            self._entries.clear()

    def slots(self) -> list[batch_pb2.Slot]:
        """What is there, oldest first."""
        with self._lock:
            return [entry.slot for entry in self._entries.values()]

    @property
    def held_bytes(self) -> int:
        """Memory of all that is there."""
        with self._lock:
            return sum(entry.rows.held_bytes for entry in self._entries.values())

    def _entry(self, slot: batch_pb2.Slot) -> _Entry:
        entry = self._find(slot)
        if entry is None:
            raise NotFound(f"there is no {describe(slot)}: it was never put, or its step is over; put it again")
        return entry

    def _find(self, slot: batch_pb2.Slot) -> _Entry | None:
        """What was put there; for a whole that was not, its parts in one."""
        entry = self._entries.get(_key(slot))
        if entry is None and _is_whole(slot) and (parts := self._parts(slot)):
            if list(parts) != list(range(1, len(parts) + 1)):
                raise WrongState(f"the {describe(slot)} has gaps: only its parts {', '.join(map(str, parts))} were put")
            rows = [part.rows for part in parts.values()]
            common = [name for name in rows[0].columns if all(name in one for one in rows)]
            return _Entry(slot, concatenate([one.select(common) for one in rows]))
        return entry

    def _parts(self, slot: batch_pb2.Slot) -> dict[int, _Entry]:
        """The parts of a whole slot, in their order."""
        parts = {key[2]: entry for key, entry in self._entries.items() if key[:2] == _key(slot)[:2] and key[2]}
        return dict(sorted(parts.items()))

    def _drop_parts(self, slot: batch_pb2.Slot) -> None:
        for part in self._parts(slot):
            del self._entries[slot.kind, slot.step, part]

    def _make_room(self) -> None:
        evaluation = [key for key in self._entries if key[0] == batch_pb2.SLOT_KIND_EVALUATION]
        for key in evaluation[: max(0, len(evaluation) - MAX_EVALUATION_SLOTS)]:
            del self._entries[key]


def describe(slot: batch_pb2.Slot) -> str:
    """A slot in words."""
    kind = "evaluation" if slot.kind == batch_pb2.SLOT_KIND_EVALUATION else "experience"
    part = f", part {slot.part}" if slot.part else ""
    return f"{kind} slot of step {slot.step}{part}"


def _is_whole(slot: batch_pb2.Slot) -> bool:
    return slot.kind == batch_pb2.SLOT_KIND_EXPERIENCE and slot.part == 0


def _key(slot: batch_pb2.Slot) -> _Key:
    return slot.kind, slot.step, slot.part
