"""Puts the results of a streamed command together on rank 0, part by part, while the command runs.

The column `places` of a rank's rows says which rows of the whole they are; a rank may have no rows of a part.
"""

import threading
from collections.abc import Callable

import numpy as np

from splitppo.batch import Batch, concatenate
from splitppo.v1 import worker_pb2


class PartGatherer:
    """Puts the parts of one streamed command together on rank 0, from the rows that all ranks send. Thread-safe.

    Args:
        num_parts: 0 if the command is not streamed.
        num_ranks: number of ranks that report each part.
        deliver: takes a complete part: the event for the callers, and all its rows by ascending place. Called in any
            thread, for one part at a time.
    """

    def __init__(self, num_parts: int, num_ranks: int, deliver: Callable[[worker_pb2.PartReady, Batch], None]) -> None:
        self.num_parts = num_parts
        self._num_ranks = num_ranks
        self._deliver = deliver
        # By part and rank: rows and the version of the weights that made them, until all ranks have sent theirs.
        self._missing: dict[int, dict[int, tuple[Batch, int]]] = {part: {} for part in range(1, num_parts + 1)}
        self._lock = threading.Lock()

    @property
    def missing(self) -> list[int]:
        """The numbers of the incomplete parts, sorted: not all ranks have sent their rows of these parts yet."""
        with self._lock:
            return sorted(self._missing)

    def add(self, rank: int, part: int, columns: Batch, policy_version: int) -> None:
        """Adds one rank's rows of a part, and delivers the part once complete; RuntimeError for a bug in a role."""
        check_streamed(part, self.num_parts)
        with self._lock:
            rows_of_ranks = self._missing.get(part)
            if rows_of_ranks is None or rank in rows_of_ranks:
                raise RuntimeError(f"rank {rank} has no part {part} left to report")
            rows_of_ranks[rank] = columns, policy_version
            if len(rows_of_ranks) == self._num_ranks:
                del self._missing[part]
                self._deliver_whole(part, rows_of_ranks)

    def _deliver_whole(self, part: int, rows_of_ranks: dict[int, tuple[Batch, int]]) -> None:
        """Puts a part's rows of all ranks together in the order of their places, and delivers it.

        Raises:
            RuntimeError: the ranks have sampled it with different weights.
        """
        versions = {version for _, version in rows_of_ranks.values()}
        if len(versions) > 1:
            raise RuntimeError(f"part {part} was made with weights of versions {sorted(versions)}")
        rows = concatenate([columns for columns, _ in rows_of_ranks.values()])
        rows = rows.take(np.argsort(rows["places"].values))
        ready = worker_pb2.PartReady(part=part, num_parts=self.num_parts, policy_version=versions.pop())
        self._deliver(ready, rows)


def check_streamed(part: int, num_parts: int) -> None:
    """Raises RuntimeError if a role reports a part of a command that is not streamed."""
    if not num_parts:
        raise RuntimeError(f"part {part} was reported, but the command is not streamed")
