"""The experience store of a service: batches by slot, from the first put until their step is committed."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from splitppo.batch import Batch
from splitppo.rpc.errors import InvalidArgument, NotFound, WrongState
from splitppo.v1 import batch_pb2, worker_pb2

MAX_EVALUATION_SLOTS = 4

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
            if slot.part != 0:
                raise InvalidArgument(f"an experience slot has part 0, got {slot.part}")
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
            present = self._entries.get(_key(slot))
            entry = _Entry(slot, present.rows.merge(batch) if present else batch)
            self._entries[_key(slot)] = entry
            self._make_room()

    def get(self, slot: batch_pb2.Slot) -> Batch:
        """The rows of a slot.

        Raises:
            NotFound: nothing was put there, or its step has been committed.
        """
        with self._lock:
            return self._entry(slot).rows

    def absorb(self, slot: batch_pb2.Slot, columns: Batch, request_id: str, reply: worker_pb2.CommandResult) -> None:
        """Takes what a command made: columns of the same rows are added, a multiple of the rows replaces them.

        Raises:
            NotFound: the slot has gone.
            ValueError: the columns do not fit.
        """
        with self._lock:
            entry = self._entry(slot)
            entry.rows = entry.rows.merge(columns) if columns.num_rows == entry.rows.num_rows else columns
            entry.replies[request_id] = reply

    def reply_of(self, slot: batch_pb2.Slot, request_id: str) -> worker_pb2.CommandResult | None:
        """The reply of a command whose work is still in the slot."""
        with self._lock:
            entry = self._entries.get(_key(slot))
            return entry.replies.get(request_id) if entry else None

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

    def _entry(self, slot: batch_pb2.Slot) -> _Entry:
        entry = self._entries.get(_key(slot))
        if entry is None:
            raise NotFound(f"there is no {describe(slot)}: it was never put, or its step is over; put it again")
        return entry

    def _make_room(self) -> None:
        evaluation = [key for key in self._entries if key[0] == batch_pb2.SLOT_KIND_EVALUATION]
        for key in evaluation[: max(0, len(evaluation) - MAX_EVALUATION_SLOTS)]:
            del self._entries[key]


def describe(slot: batch_pb2.Slot) -> str:
    """A slot in words."""
    kind = "evaluation" if slot.kind == batch_pb2.SLOT_KIND_EVALUATION else "experience"
    part = f", part {slot.part}" if slot.part else ""
    return f"{kind} slot of step {slot.step}{part}"


def _key(slot: batch_pb2.Slot) -> _Key:
    return slot.kind, slot.step, slot.part
