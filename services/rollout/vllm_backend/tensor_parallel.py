"""Lets ranks share one vLLM engine (tensor parallelism): consecutive ranks of the actor, led by the lowest one.

The leader gets all rows of a replica (the ranks of one engine). The other ranks get a copy from the leader, run the
same engine steps, and drop their copy of the results.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist

from services.runtime.ranks.control_channel import ControlChannel
from splitppo.batch import Batch

_STEPS_PER_QUESTION = 8


class Replica:
    """The num_ranks ranks that share one vLLM engine, this rank included; made by all ranks of the actor together."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._leader = rank - rank % num_ranks
        self.is_leader = rank == self._leader
        if num_ranks > 1:
            self._group, _ = dist.new_subgroups(num_ranks, backend="gloo")  # type: ignore[no-untyped-call]
            self._channel = ControlChannel(num_ranks, self._group)

    def share(self, rows: Batch) -> Batch:
        """Broadcasts the leader's rows to all ranks that share its engine; every rank returns them."""
        if not self.is_leader:
            shared = self._channel.receive(self._leader)
            assert shared is not None
            return shared
        for other in range(self._leader + 1, self._leader + self._num_ranks):
            self._channel.send(rows, other)
        return rows

    def agree(self, is_cancelled: Callable[[], bool], step: int) -> bool:
        """Returns the leader's `is_cancelled` on all ranks of its engine, so that they stop in the same step.

        Several ranks ask only in every 8th step, by a broadcast; in other steps the result is False.
        """
        if self._num_ranks == 1:
            return is_cancelled()
        if step % _STEPS_PER_QUESTION:
            return False
        answer = torch.tensor([is_cancelled()])
        dist.broadcast(answer, self._leader, group=self._group)
        return bool(answer)
