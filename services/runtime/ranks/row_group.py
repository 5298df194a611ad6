"""Neighbouring ranks that have the same rows: those of a vLLM engine, or those that divide the positions of rows.

The first of them gets all their rows from rank 0, and sends the others a copy. Its results are those of all of them.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch.distributed as dist

from services.runtime.command import Command, CommandProgress, Outcome
from services.runtime.ranks.control_channel import ControlChannel
from services.runtime.ranks.sharding import Indices, shard_evenly
from splitppo.batch import Batch


class RowGroup:
    """The `num_ranks` neighbours that have the same rows, this rank included; made by all ranks together."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._leader = rank - rank % num_ranks
        self.is_leader = rank == self._leader
        self._others = range(self._leader + 1, self._leader + num_ranks)
        if num_ranks > 1:
            _check_is_partition(num_ranks)
            self._group, _ = dist.new_subgroups(num_ranks, backend="gloo")  # type: ignore[no-untyped-call]
            self._channel = ControlChannel(num_ranks, self._group)

    def share(self, rows: Batch) -> Batch:
        """Sends the leader's rows to all ranks of this group; every rank returns them."""
        if not self.is_leader:
            shared = self._channel.receive(self._leader)
            assert shared is not None
            return shared
        self._send(rows)
        return rows

    def share_rows_of(self, command: Command) -> Command:
        """Returns a command on rows that runs with the rows of this group on each of its ranks."""
        if self._num_ranks == 1:
            return command
        divide = command.rows.shard or shard_evenly

        def run(request: Any, rows: Batch, progress: CommandProgress) -> Outcome:
            outcome = command.run(request, self.share(rows), progress)
            return outcome if self.is_leader else replace(outcome, columns=None)

        def shard(batch: Batch, num_ranks: int) -> Sequence[Indices]:
            return to_leaders(divide(batch, num_ranks // self._num_ranks), self._num_ranks)

        return replace(command, run=run, rows=replace(command.rows, shard=shard))

    def _send(self, rows: Batch | None) -> None:
        for other in self._others:
            self._channel.send(rows, other)


def _check_is_partition(num_ranks: int) -> None:
    """Raises ValueError unless `num_ranks` divides the ranks of the default process group.

    Beside an NCCL group that is bound to a device, torch lets a rank split the communicator for each new group that it
    is not in, which waits for all ranks, but not for a gloo group that it is in. If each rank is in exactly one of the
    groups, all ranks split equally often; else they would wait for ever.
    """
    if dist.get_world_size() % num_ranks:
        raise ValueError(
            f"{num_ranks} ranks each share their rows: expected a divisor of {dist.get_world_size()} ranks"
        )


def to_leaders(shares: Sequence[Indices], num_ranks: int) -> list[Indices]:
    """Returns the row indices of each rank from those of groups of `num_ranks` ranks, whose first rank has all."""
    nothing = [np.empty(0, np.int64)] * (num_ranks - 1)
    return [rows for share in shares for rows in (share, *nothing)]
