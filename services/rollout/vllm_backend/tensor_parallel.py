"""Lets ranks share one vLLM engine (tensor parallelism): consecutive ranks of the actor, led by the lowest one.

The leader gets all rows of a replica (the ranks of one engine), and the replies to their turns. The other ranks get a
copy from the leader, run the same engine steps, and drop their copy of the results.
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from services.rollout.protocol import OpenTurns
from services.runtime.command import CommandCancelled
from services.runtime.ranks.row_group import RowGroup
from splitppo.batch import Batch
from splitppo.v1.conversation_pb2 import ReplyRequest, TurnReply

_STEPS_PER_QUESTION = 8


class Replica(RowGroup):
    """The ranks that share one vLLM engine, this rank included; made by all ranks of the actor together."""

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

    def due(self, open_turns: OpenTurns, step: int, *, is_idle: bool) -> Sequence[tuple[int, TurnReply]] | None:
        """Returns which of the leader's open turns are due, on all ranks of its engine, so that they go on together.

        See `OpenTurns.due`; here it is the index of a response and the reply.
        Several ranks ask only in every 8th step, and when they are idle. While the leader waits, each of the others
        gets None at least every second, and must ask again.

        Raises:
            CommandCancelled: the leader's command was cancelled while it waited.
        """
        if self._num_ranks > 1 and step % _STEPS_PER_QUESTION and not is_idle:
            return ()
        return self._find_due(open_turns, is_idle=is_idle) if self.is_leader else self._receive_due()

    def _receive_due(self) -> Sequence[tuple[int, TurnReply]] | None:
        """Returns on another rank than the leader what the leader has found due; None while the leader waits."""
        indices = self._channel.receive(self._leader)
        if indices is None:
            return None
        replies = ReplyRequest.FromString(self._channel.receive_bytes(self._leader)).replies
        return list(zip(indices["places"].values.tolist(), replies, strict=True))

    def _find_due(self, open_turns: OpenTurns, *, is_idle: bool) -> Sequence[tuple[int, TurnReply]]:
        """Finds on the leader what is due, and tells the other ranks of its engine.

        While it waits, the others get None, so that they can report progress.
        """
        try:
            due = open_turns.due(is_idle=is_idle, while_waiting=lambda: self._send(None))
        except CommandCancelled:
            for other in self._others:
                self._channel.send_cancelled(other)
            raise
        if self._others:
            self._send(Batch.from_rows(places=[[answered.response.index] for answered in due]))
            replies = ReplyRequest(replies=[answered.reply for answered in due]).SerializeToString()
            for other in self._others:
                self._channel.send_bytes(replies, other)
        return [(answered.response.index, answered.reply) for answered in due]
