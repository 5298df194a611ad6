"""Streamed commands: each rank sends its rows of a part as soon as they are done, rank 0 puts the parts together.

    rank 0, main thread          rank 0, a thread per other rank          ranks 1..N-1
    run                          receive  <---- part, its rows ---------- run
      own rows of a part ---+------+
                            v
              all rows of the part are there: keep them, tell the callers
    run has ended                receive  <---- the end ----------------- run has ended

A rank has rows of some parts only; which, rank 0 knows, because it dealt them out. The threads live as long as the
command; what they receive on is a process group of its own, so that they disturb nobody.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from services.shell.collectives import ControlChannel
from services.shell.sharding import Indices, join_shards
from splitppo.batch import Batch

_END = 0


@dataclass
class _Part:
    """A part that is not complete yet.

    Attributes:
        shards: rows of the slot that each rank works on.
        columns: what the ranks have made of them so far.
    """

    shards: Sequence[Indices]
    columns: dict[int, Batch] = field(default_factory=dict)
    versions: set[int] = field(default_factory=set)


class PartGatherer:
    """Rank 0: the parts of one command, as the ranks' shares of them come in. Thread-safe.

    Args:
        shards: rows that each rank was given.
        groups: [num_rows], the part of each row, counted from 0.
        deliver: takes a complete part: its number from 1, all its rows in order, the version of its weights. Called in
            any thread, for one part at a time.

    Raises:
        RuntimeError: `groups` leaves one out; a role's `prepare` has a bug.
    """

    def __init__(self, shards: Sequence[Indices], groups: Indices, deliver: Callable[[int, Batch, int], None]) -> None:
        known = np.unique(groups)
        if not np.array_equal(known, np.arange(len(known))):
            raise RuntimeError(f"groups must be numbered from 0 without gaps, got {known.tolist()}")
        self.num_parts = len(known)
        self._missing = {
            group + 1: _Part([shard[groups[shard] == group] for shard in shards]) for group in range(self.num_parts)
        }
        self._deliver = deliver
        self._lock = threading.Lock()

    @property
    def missing(self) -> list[int]:
        """The parts that are not complete."""
        with self._lock:
            return sorted(self._missing)

    def add(self, rank: int, part: int, columns: Batch, policy_version: int) -> None:
        """Takes a rank's rows of a part.

        Raises:
            RuntimeError: the part is unknown or complete, or the ranks do not agree; a role has a bug.
        """
        with self._lock:
            one = self._missing.get(part)
            if one is None or rank in one.columns or not len(one.shards[rank]):
                raise RuntimeError(f"rank {rank} has no rows of part {part} left to report")
            one.columns[rank] = columns
            one.versions.add(policy_version)
            if len(one.columns) < sum(len(shard) > 0 for shard in one.shards):
                return
            del self._missing[part]
            if len(one.versions) > 1:
                raise RuntimeError(f"part {part} was made with weights of versions {sorted(one.versions)}")
            rows = join_shards(one.shards, [one.columns.get(rank) for rank in range(len(one.shards))])
            assert rows is not None
            self._deliver(part, rows, policy_version)


class PartSender:
    """Every other rank: its rows of each part, on their way to rank 0."""

    def __init__(self, channel: ControlChannel) -> None:
        self._channel = channel

    def send(self, part: int, columns: Batch, policy_version: int) -> None:
        """Sends rows; returns when rank 0 has them."""
        self._channel.send_numbers((part, policy_version), 0)
        self._channel.send(columns, 0)

    def end(self) -> None:
        """No more will come, of this command."""
        self._channel.send_numbers((_END, 0), 0)


@contextmanager
def received_parts(
    channel: ControlChannel, gatherer: PartGatherer, on_error: Callable[[Exception], None]
) -> Iterator[None]:
    """Rank 0: within the block, what the other ranks send is added to `gatherer`; ends when all have said so.

    Args:
        channel: over the process group for parts.
        gatherer: takes the rows.
        on_error: called in the thread of a rank that cannot be heard any more, or has sent what does not fit.
    """

    def receive(rank: int) -> None:
        try:
            while (message := channel.receive_numbers(2, rank))[0] != _END:
                columns = channel.receive(rank)
                assert columns is not None
                gatherer.add(rank, message[0], columns, message[1])
        except Exception as error:  # noqa: BLE001 - the edge of a thread
            on_error(error)

    threads = [
        threading.Thread(target=receive, args=(rank,), name=f"parts-{rank}", daemon=True)
        for rank in range(1, channel.world_size)
    ]
    for thread in threads:
        thread.start()
    yield
    for thread in threads:
        thread.join()
