"""Tracks the conversations of a running command on rank 0: which turns have ended, and which replies were taken."""

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue

from services.runtime.role import ReplyLimits, ReplyQueue
from splitppo.rpc.errors import InvalidArgument
from splitppo.v1 import conversation_pb2


@dataclass
class _Response:
    """One response: its rank, its turns that have ended, those with a reply, and its length in tokens so far."""

    rank: int
    num_turns: int = 0
    num_replies: int = 0
    length: int = 0
    has_ended: bool = False


class OpenConversations:
    """The conversations of one running command: checks replies, and gives each to the rank that has the row.

    Thread-safe: the gRPC thread brings replies, and one thread per rank reports turns.

    Args:
        limits: those of the command's replies.
        places: the places of each rank's responses, by rank.
        announce: tells the command's callers of ended turns; they may be answered from then on.

    Attributes:
        replies: the queue of each rank, by rank.
    """

    def __init__(
        self,
        limits: ReplyLimits,
        places: Sequence[Iterable[int]],
        announce: Callable[[conversation_pb2.TurnsEnded], None],
    ) -> None:
        self._limits = limits
        self._announce = announce
        self._responses = {place: _Response(rank) for rank, of_rank in enumerate(places) for place in of_rank}
        self._lock = threading.Lock()
        self.replies: list[ReplyQueue] = [SimpleQueue() for _ in places]

    def turns_ended(self, rank: int, ended: conversation_pb2.TurnsEnded) -> None:
        """Notes turns of a rank's responses that have ended, and announces them; RuntimeError for a bug in a role."""
        with self._lock:
            for turn in ended.turns:
                response = self._responses.get(turn.place)
                is_open = response is not None and response.rank == rank and not response.has_ended
                if response is None or not is_open or not turn.turn - 1 == response.num_turns == response.num_replies:
                    raise RuntimeError(f"rank {rank} has no turn {turn.turn} of response {turn.place} to end")
                response.num_turns = turn.turn
                response.length += len(turn.tokens)
                response.has_ended = turn.is_last
        self._announce(ended)

    def reply(self, replies: Sequence[conversation_pb2.TurnReply]) -> None:
        """Takes the replies of one request, all or none; replies to turns that have one already are ignored.

        Raises:
            InvalidArgument: one of them cannot be a reply to its turn.
        """
        if len({(reply.place, reply.turn) for reply in replies}) < len(replies):
            raise InvalidArgument("the request has two replies to the same turn")
        with self._lock:
            new = [(reply, self._responses[reply.place]) for reply in replies if self._is_new(reply)]
            by_rank: dict[int, list[conversation_pb2.TurnReply]] = defaultdict(list)
            for reply, response in new:
                response.num_replies = reply.turn
                response.length += len(reply.tokens)
                response.has_ended = reply.is_last
                by_rank[response.rank].append(reply)
            for rank, of_rank in by_rank.items():
                self.replies[rank].put(of_rank)

    def _is_new(self, reply: conversation_pb2.TurnReply) -> bool:
        """Returns False if the turn of a possible reply has one already; InvalidArgument if it cannot be a reply."""
        turn = f"turn {reply.turn} of response {reply.place}"
        tokens = reply.tokens
        limits = self._limits
        if (response := self._responses.get(reply.place)) is None:
            raise InvalidArgument(f"there is no response {reply.place}; there are {len(self._responses)} responses")
        if not 1 <= reply.turn <= response.num_turns:
            raise InvalidArgument(f"{turn} has not ended: {response.num_turns} of its turns have")
        if bool(tokens) == reply.is_last:
            raise InvalidArgument(f"the reply to {turn} must have tokens, or is_last and no tokens")
        if tokens and not 0 <= min(tokens) <= max(tokens) < limits.num_token_ids:
            raise InvalidArgument(f"the reply to {turn} has a token id outside of 0 to {limits.num_token_ids - 1}")
        if reply.turn <= response.num_replies:
            return False
        if response.has_ended:
            raise InvalidArgument(f"{turn} is the last one, and takes no reply")
        if (length := response.length + len(tokens)) >= limits.max_response_length:
            raise InvalidArgument(
                f"after the reply to {turn} the response would have {length} tokens, expected fewer than"
                f" {limits.max_response_length}"
            )
        return True
