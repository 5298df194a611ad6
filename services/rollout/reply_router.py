"""Tracks the turns of a running Generate on rank 0: which have ended, and which have a reply; checks replies.

a rank samples a turn          -> `from_rank`   -> event TurnsEnded for the callers
a caller answers it by Reply   -> `from_caller` -> the rank that has the response (open_turns.py)
"""

import threading
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from splitppo.rpc.errors import InvalidArgument
from splitppo.v1 import conversation_pb2, worker_pb2


@dataclass(frozen=True)
class ReplyLimits:
    """The limits by which replies to turns are checked when they arrive.

    Attributes:
        num_token_ids: token ids are 0 to num_token_ids - 1.
        max_response_length: the most tokens of a response, replies included.
    """

    num_token_ids: int
    max_response_length: int


@dataclass
class _Response:
    """One response: its rank, its turns that have ended, those with a reply, and its length in tokens so far."""

    rank: int
    num_turns: int = 0
    num_replies: int = 0
    length: int = 0
    has_ended: bool = False


class ReplyRouter:
    """The turns of one running Generate: checks replies, and sends each to the rank that has its response.

    A `services.runtime.command.MessageRouter`. Its messages are a TurnsEnded of a rank, and a ReplyRequest of a caller.

    Args:
        places: the places of each rank's responses, by rank.
    """

    def __init__(self, limits: ReplyLimits, places: Sequence[Iterable[int]]) -> None:
        self._limits = limits
        self._responses = {place: _Response(rank) for rank, of_rank in enumerate(places) for place in of_rank}
        self._lock = threading.Lock()

    def from_rank(self, rank: int, message: bytes) -> worker_pb2.CommandEvent:
        """Notes turns of a rank's responses that have ended; returns the event about them."""
        ended = conversation_pb2.TurnsEnded.FromString(message)
        with self._lock:
            for turn in ended.turns:
                self._note(rank, turn)
        return worker_pb2.CommandEvent(turns=ended)

    def _note(self, rank: int, turn: conversation_pb2.Turn) -> None:
        """Notes that a turn has ended; RuntimeError unless it is the next one of that rank's response."""
        response = self._responses.get(turn.place)
        is_open = response is not None and response.rank == rank and not response.has_ended
        if response is None or not is_open or not turn.turn - 1 == response.num_turns == response.num_replies:
            raise RuntimeError(f"rank {rank} has no turn {turn.turn} of response {turn.place} to end")
        response.num_turns = turn.turn
        response.length += len(turn.tokens)
        response.has_ended = turn.is_last

    def from_caller(self, request: conversation_pb2.ReplyRequest) -> Mapping[int, bytes]:
        """Takes the replies of one request, all or none; returns those of each rank, as a ReplyRequest.

        Replies to turns that have one already are ignored.

        Raises:
            InvalidArgument: one of them cannot be a reply to its turn.
        """
        replies = request.replies
        if len({(reply.place, reply.turn) for reply in replies}) < len(replies):
            raise InvalidArgument("the request has two replies to the same turn")
        by_rank: dict[int, list[conversation_pb2.TurnReply]] = defaultdict(list)
        with self._lock:
            new = [reply for reply in replies if self._is_new(reply)]
            for reply in new:
                response = self._responses[reply.place]
                response.num_replies = reply.turn
                response.length += len(reply.tokens)
                response.has_ended = reply.is_last
                by_rank[response.rank].append(reply)
        return {
            rank: conversation_pb2.ReplyRequest(replies=of_rank).SerializeToString()
            for rank, of_rank in by_rank.items()
        }

    def _is_new(self, reply: conversation_pb2.TurnReply) -> bool:
        """Returns True if the turn waits for this reply, False if it has had one already.

        Raises:
            InvalidArgument: the turn has not ended, or takes no reply like this one.
        """
        turn = f"turn {reply.turn} of response {reply.place}"
        tokens = reply.tokens
        limits = self._limits
        response = self._responses.get(reply.place)
        if response is None:
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
        length = response.length + len(tokens)
        if length >= limits.max_response_length:
            raise InvalidArgument(
                f"after the reply to {turn} the response would have {length} tokens, expected fewer than"
                f" {limits.max_response_length}"
            )
        return True
