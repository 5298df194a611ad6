"""The open turns of one rank: those that have ended and wait for a reply, after which their response goes on.

A response whose turn ended in decoding step k is due at step k + reply_steps; generation waits for its reply there. If
nothing can be decoded, the steps until the earliest response is due are left out. So what is decoded together depends
on tokens alone. With 0 reply_steps a response goes on as soon as its reply is there.

Turns and replies travel as messages of the running command; rank 0 checks them (reply_router.py).
"""

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from services.rollout.protocol import Answered, DecodingStep, Response
from services.runtime.command import CommandCancelled, CommandProgress
from splitppo import failpoints
from splitppo.rpc.wire_format import divide
from splitppo.v1 import actor_pb2
from splitppo.v1.conversation_pb2 import ReplyRequest, Turn, TurnLimits, TurnReply, TurnsEnded

_WAIT_S = 0.5
# The most bytes of a message with turns, far below the limit of gRPC.
_MAX_MESSAGE_BYTES = 1 << 20
_NO_LIMITS = TurnLimits()


def send_turns(report: CommandProgress, turns: Sequence[Turn]) -> None:
    """Tells the callers of a running Generate about turns of this rank's responses that have ended."""
    for some in divide(turns, _MAX_MESSAGE_BYTES):
        report.send(TurnsEnded(turns=some).SerializeToString())
    for _ in turns:
        failpoints.hit(f"{report.point}.turn")


def receive_replies(report: CommandProgress, timeout_s: float) -> Sequence[TurnReply]:
    """Takes the replies to this rank's turns that have arrived since the last call.

    If there are none, it waits for the first one, at most for this time.
    """
    replies: list[TurnReply] = []
    for message in report.receive(timeout_s):
        replies += ReplyRequest.FromString(message).replies
    for _ in replies:
        failpoints.hit(f"{report.point}.reply")
    return replies


class _Waiting(NamedTuple):
    """A response whose turn has ended, and the decoding step at which it is due."""

    due_step: int
    response: Response


class RankTurns:
    """The clock of one rank's decoding steps, and its responses that wait for replies; see `protocol.OpenTurns`.

    Attributes:
        waited_s: seconds in which nothing was decoded, because a reply was missing.
    """

    def __init__(self, request: actor_pb2.GenerateRequest, report: CommandProgress) -> None:
        self._conversation = request.conversation
        self._first_limits = {first.place: first.limits for first in request.conversation.first_turns}
        self._report = report
        self._max_response_length = request.sampling.max_response_length
        self._clock = 0
        self._progress = (0, 0)
        # Keys of both: the response's place in the request, and the number of its turn.
        self._waiting: dict[tuple[int, int], _Waiting] = {}
        self._replies: dict[tuple[int, int], TurnReply] = {}
        self.waited_s = 0.0

    @property
    def any_open(self) -> bool:
        """True while responses wait for replies."""
        return bool(self._waiting)

    def max_tokens(self, response: Response) -> int:
        """Returns the number of tokens of a response at which its next turn must end: the least of all limits."""
        room = self._max_response_length - len(response.tokens)
        room = min(room, self._conversation.max_turn_length or room, self._limits_of(response).max_tokens or room)
        if self._conversation.max_context_length:
            room = min(room, self._conversation.max_context_length - response.num_context_tokens)
        return len(response.tokens) + room

    def stop_texts(self, response: Response) -> Sequence[str]:
        """Returns the texts that end the next turn of a response, beside those of the run."""
        return self._limits_of(response).stop

    def _limits_of(self, response: Response) -> TurnLimits:
        """Returns the limits that the next turn of a response has of its own."""
        return response.limits if response.replies else self._first_limits.get(response.place, _NO_LIMITS)

    def announce(self, step: DecodingStep) -> None:
        """Counts a decoding step, and reports the turns that have ended in it.

        A response that is full takes no reply, but its last turn is reported as well.
        """
        self._clock += 1
        self._progress = (step.done, step.total)
        full = [response for response in step.ended if len(response.tokens) == self._max_response_length]
        turns = [self._turn(response) for response in step.turns]
        turns += [self._turn(response, is_last=True) for response in full]
        for response in step.turns:
            self._waiting[self._key(response)] = _Waiting(self._clock + self._conversation.reply_steps, response)
        if turns:
            send_turns(self._report, turns)

    def due(self, *, is_idle: bool, while_waiting: Callable[[], None] = lambda: None) -> Sequence[Answered]:
        """Returns the responses that go on after this decoding step, by due step and index; see `OpenTurns`.

        When nothing can be decoded, the clock goes to the earliest step in which a response is due. With reply_steps
        every response that is due is waited for; without, only one, and only if nothing can be decoded.
        """
        if is_idle and self._waiting:
            self._clock = max(self._clock, min(waiting.due_step for waiting in self._waiting.values()))
        due = {turn for turn, waiting in self._waiting.items() if waiting.due_step <= self._clock}
        if due:
            num_needed = len(due) if self._conversation.reply_steps else int(is_idle)
            self._wait_for_replies(due, num_needed, while_waiting)
        due_with_reply = due & self._replies.keys()
        answered = [(self._waiting.pop(turn), self._replies.pop(turn)) for turn in due_with_reply]
        answered.sort(key=lambda pair: (pair[0].due_step, pair[0].response.index))
        return [Answered(waiting.response, reply) for waiting, reply in answered]

    def _wait_for_replies(self, due: set[tuple[int, int]], num_needed: int, while_waiting: Callable[[], None]) -> None:
        """Takes replies until `num_needed` of the responses that are `due` (places and turns) have one.

        CommandCancelled if the command is cancelled meanwhile.
        """
        started_s = time.perf_counter()
        wait_s = 0.0
        while True:
            for reply in receive_replies(self._report, wait_s):
                self._replies[reply.place, reply.turn] = reply
            missing = due - self._replies.keys()
            if len(due) - len(missing) >= num_needed:
                break
            if self._report.is_cancelled():
                raise CommandCancelled
            self._report(*self._progress, f"waiting for {len(missing)} replies")
            while_waiting()
            wait_s = _WAIT_S
        self.waited_s += time.perf_counter() - started_s

    def _turn(self, response: Response, *, is_last: bool = False) -> Turn:
        place, number = self._key(response)
        log_probs = response.turn_log_probs if self._conversation.with_log_probs else ()
        return Turn(place=place, turn=number, tokens=response.turn_tokens, is_last=is_last, log_probs=log_probs)

    def _key(self, response: Response) -> tuple[int, int]:
        """Returns the place of a response, and the number of its latest turn."""
        return response.place, len(response.replies) + 1
