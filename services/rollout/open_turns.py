"""The conversations of one rank: announces ended turns, takes the replies, and says when a response goes on.

A response whose turn ended in decoding step k is due at step k + reply_steps; generation waits for its reply there. If
nothing can be decoded, the steps until the earliest response is due are left out. So what is decoded together depends
on tokens alone. With 0 reply_steps a response goes on as soon as its reply is there.
"""

import time
from collections.abc import Callable, Sequence
from operator import itemgetter

from services.rollout.protocol import DecodingStep, Response
from services.runtime.role import CommandCancelled, CommandProgress
from splitppo.batch import Batch
from splitppo.v1 import actor_pb2
from splitppo.v1.conversation_pb2 import Turn, TurnReply

_WAIT_S = 0.5


class RankConversations:
    """The clock of one rank's decoding steps and its responses that wait for replies; see `protocol.Conversations`.

    `rows` are those of this rank, with the column `places`.

    Attributes:
        waited_s: seconds in which nothing was decoded, because a reply was missing.
    """

    def __init__(self, rows: Batch, request: actor_pb2.GenerateRequest, report: CommandProgress) -> None:
        self._limits = request.conversation
        self._report = report
        self._max_response_length = request.sampling.max_response_length
        self._places = rows["places"].values
        self._clock = 0
        self._progress = (0, 0)
        # Both by place and number of the turn; a response that waits with the step at which it is due.
        self._waiting: dict[tuple[int, int], tuple[int, Response]] = {}
        self._replies: dict[tuple[int, int], TurnReply] = {}
        self.waited_s = 0.0

    @property
    def are_open(self) -> bool:
        """True while responses wait for replies."""
        return bool(self._waiting)

    def max_tokens(self, response: Response) -> int:
        """Returns the number of tokens of a response at which its next turn must end."""
        longest = self._limits.max_turn_length or self._max_response_length
        return min(len(response.tokens) + longest, self._max_response_length)

    def announce(self, step: DecodingStep) -> None:
        """Counts a decoding step, and reports the turns that have ended in it."""
        self._clock += 1
        self._progress = step.done, step.total
        full = [response for response in step.ended if len(response.tokens) == self._max_response_length]
        turns = []
        for response in (*step.turns, *full):
            place, number = key = self._key(response)
            is_last = len(response.tokens) == self._max_response_length
            turns.append(Turn(place=place, turn=number, tokens=response.turn_tokens, is_last=is_last))
            if not is_last:
                self._waiting[key] = self._clock + self._limits.reply_steps, response
        if turns:
            self._report.turns_ended(turns)

    def due(
        self, *, is_idle: bool, while_waiting: Callable[[], None] = lambda: None
    ) -> Sequence[tuple[Response, Sequence[int], bool]]:
        """Returns the responses that go on after this decoding step, by due step and index; see `Conversations`."""
        if is_idle and self._waiting:
            self._clock = max(self._clock, min(step for step, _ in self._waiting.values()))
        due = {key for key, (step, _) in self._waiting.items() if step <= self._clock}
        if due:
            self._collect(due, len(due) if self._limits.reply_steps else int(is_idle), while_waiting)
        admitted = []
        for key in due & self._replies.keys():
            (step, response), reply = self._waiting.pop(key), self._replies.pop(key)
            admitted.append((step, response.index, (response, reply.tokens, reply.is_last)))
        return [item for *_, item in sorted(admitted, key=itemgetter(0, 1))]

    def _collect(self, due: set[tuple[int, int]], num_needed: int, while_waiting: Callable[[], None]) -> None:
        """Takes replies until there are so many for the responses that are due."""
        started_s = time.perf_counter()
        wait_s = 0.0
        while True:
            self._replies |= {(reply.place, reply.turn): reply for reply in self._report.take_replies(wait_s)}
            missing = due - self._replies.keys()
            if len(due) - len(missing) >= num_needed:
                break
            if self._report.is_cancelled():
                raise CommandCancelled
            self._report(*self._progress, f"waiting for {len(missing)} replies")
            while_waiting()
            wait_s = _WAIT_S
        self.waited_s += time.perf_counter() - started_s

    def _key(self, response: Response) -> tuple[int, int]:
        return int(self._places[response.index]), len(response.replies) + 1
