"""Tracks the turns of a running Generate on rank 0: which have ended, and which have a reply; checks replies.

a rank samples a turn          -> `from_rank`   -> event TurnsEnded for the callers
a caller answers it by Reply   -> `from_caller` -> the rank that has the response (open_turns.py)
"""

import threading
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from splitppo.rpc.errors import InvalidArgument
from splitppo.v1 import conversation_pb2, worker_pb2

MAX_STOP_TEXTS = 16  # of one turn


@dataclass(frozen=True)
class ReplyLimits:
    """The limits by which replies to turns are checked when they arrive.

    Attributes:
        num_token_ids: token ids are 0 to num_token_ids - 1.
        max_response_length: the most tokens of a response, replies included.
        max_context_length: the most tokens of a context, those sampled in it included; 0: no limit of its own.
        takes_stop_texts: True if turns may have texts that end them.
    """

    num_token_ids: int
    max_response_length: int
    max_context_length: int
    takes_stop_texts: bool


@dataclass
class _Response:
    """One response: its rank, its turns that have ended, those with a reply, and lengths in tokens so far."""

    rank: int
    context_length: int  # of the tokens that the next one follows
    length: int = 0  # of the whole response
    num_turns: int = 0
    num_replies: int = 0
    has_ended: bool = False


class ReplyRouter:
    """The turns of one running Generate: checks replies, and sends each to the rank that has its response.

    A `services.runtime.command.MessageRouter`. Its messages are a TurnsEnded of a rank, and a ReplyRequest of a caller.

    Args:
        prompts: the places of each rank's responses, by rank, and the lengths of their prompts.
    """

    def __init__(self, limits: ReplyLimits, prompts: Sequence[Mapping[int, int]]) -> None:
        self._limits = limits
        self._responses = {
            place: _Response(rank, length) for rank, of_rank in enumerate(prompts) for place, length in of_rank.items()
        }
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
        response.context_length += len(turn.tokens)
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
                response.context_length = _context_length(response, reply)
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
        response = self._responses.get(reply.place)
        if response is None:
            raise InvalidArgument(f"there is no response {reply.place}; there are {len(self._responses)} responses")
        if not 1 <= reply.turn <= response.num_turns:
            raise InvalidArgument(f"{turn} has not ended: {response.num_turns} of its turns have")
        self._check_values(reply, turn)
        if reply.turn <= response.num_replies:
            return False
        if response.has_ended:
            raise InvalidArgument(f"{turn} is the last one, and takes no reply")
        if not reply.is_last:
            self._check_room(response, reply)
        return True

    def _check_values(self, reply: conversation_pb2.TurnReply, turn: str) -> None:
        """Raises InvalidArgument if no turn could have this reply; `turn` names the one that it is to."""
        tokens = reply.tokens
        limits = self._limits
        if bool(tokens) == reply.is_last:
            raise InvalidArgument(f"the reply to {turn} must have tokens, or is_last and no tokens")
        if reply.is_last and (reply.begins_context or reply.limits.ByteSize()):
            raise InvalidArgument(f"the reply to {turn} is_last, and says something of the turn that follows")
        if tokens and not 0 <= min(tokens) <= max(tokens) < limits.num_token_ids:
            raise InvalidArgument(f"the reply to {turn} has a token id outside of 0 to {limits.num_token_ids - 1}")
        if problem := problem_of_limits(reply.limits, takes_stop_texts=limits.takes_stop_texts):
            raise InvalidArgument(f"the turn after {turn}: {problem}")

    def _check_room(self, response: _Response, reply: conversation_pb2.TurnReply) -> None:
        """Raises InvalidArgument unless a token fits into response and context behind the tokens of a reply."""
        lengths = {
            "the response": (response.length + len(reply.tokens), self._limits.max_response_length),
            "its context": (_context_length(response, reply), self._limits.max_context_length),
        }
        for name, (length, most) in lengths.items():
            if 0 < most <= length:
                raise InvalidArgument(
                    f"after the reply to turn {reply.turn} of response {reply.place} {name} would have {length} tokens,"
                    f" expected fewer than {most}"
                )


def problem_of_limits(limits: conversation_pb2.TurnLimits, *, takes_stop_texts: bool) -> str:
    """Returns in one sentence why a turn cannot have these limits; empty if it can."""
    if limits.max_tokens < 0:
        return f"limits.max_tokens must be 0 or positive, got {limits.max_tokens}"
    if len(limits.stop) > MAX_STOP_TEXTS or not all(limits.stop):
        return f"limits.stop must have at most {MAX_STOP_TEXTS} texts, none empty, got {str(list(limits.stop))[:200]}"
    if limits.stop and not takes_stop_texts:
        return (
            "limits.stop needs a tokenizer with a tokenizer.json (data.tokenizer), with vLLM also"
            " rollout.multi_turn.environments or rollout.stop when its engine starts"
        )
    return ""


def _context_length(response: _Response, reply: conversation_pb2.TurnReply) -> int:
    """Returns the number of tokens that the next one follows after this reply."""
    return len(reply.tokens) + (0 if reply.begins_context else response.context_length)
