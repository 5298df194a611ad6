"""Replies to the turns of a running Generate that come as a script says: which, in what order, and how late."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from services.rollout.open_turns import RankTurns
from services.rollout.protocol import DecodingStep, Response, RolloutBackend, Sampling
from splitppo.batch import Batch
from splitppo.v1 import conversation_pb2
from splitppo.v1.conversation_pb2 import ReplyRequest, Turn, TurnLimits, TurnReply, TurnsEnded
from tests.support.roles import RecordedProgress, generate_request
from tests.support.turns import turn_reply

Script = Callable[[Turn], TurnReply]


def last(turn: Turn) -> TurnReply:
    """Ends every response after its first turn."""
    return turn_reply(turn.place, turn.turn, is_last=True)


def replies_of(num_turns: int, budget: int, vocab_size: int = 20) -> Script:
    """Replies of one to four tokens that depend on the turn's tokens, until there are so many turns.

    `budget`: the longest response. A reply that leaves no room for a token ends the response.
    """
    lengths: dict[int, int] = {}

    def reply(turn: Turn) -> TurnReply:
        rng = np.random.default_rng([turn.place, turn.turn, *turn.tokens])
        tokens = rng.integers(3, vocab_size, rng.integers(1, 5)).tolist()
        lengths[turn.place] = lengths.get(turn.place, 0) + len(turn.tokens) + len(tokens)
        if turn.turn >= num_turns or lengths[turn.place] >= budget:
            return turn_reply(turn.place, turn.turn, is_last=True)
        return turn_reply(turn.place, turn.turn, tokens)

    return reply


def contexts_of(
    num_turns: int, budget: int, max_context_length: int, vocab_size: int = 20, stop: Sequence[str] = ()
) -> Script:
    """Replies of which every second one, from the first on, begins a context, as does one that fits into none.

    They depend on the turn's tokens, end as those of `replies_of`, and every third one limits the turn that follows to
    two tokens and by stop texts.
    """
    lengths: dict[int, int] = {}
    contexts: dict[int, int] = {}

    def reply(turn: Turn) -> TurnReply:
        rng = np.random.default_rng([turn.place, turn.turn, *turn.tokens])
        tokens = rng.integers(3, vocab_size, rng.integers(1, 5)).tolist()
        lengths[turn.place] = lengths.get(turn.place, 0) + len(turn.tokens) + len(tokens)
        if turn.turn >= num_turns or lengths[turn.place] >= budget:
            return turn_reply(turn.place, turn.turn, is_last=True)
        made = turn_reply(turn.place, turn.turn, tokens)
        continued = contexts.get(turn.place, 0) + len(turn.tokens) + len(tokens)
        made.begins_context = turn.turn % 2 == 1 or continued >= max_context_length
        contexts[turn.place] = len(tokens) if made.begins_context else continued
        if turn.turn % 3 == 0:
            made.limits.CopyFrom(TurnLimits(max_tokens=2, stop=stop))
        return made

    return reply


class ScriptedReplies(RecordedProgress):
    """The progress of a command whose turns are answered by a script.

    Each reply comes after up to `most_late` questions for replies, in an order drawn with `seed`.
    """

    def __init__(self, script: Script, *, most_late: int = 0, seed: int = 0, questions: int | None = None) -> None:
        super().__init__(questions=questions)
        self.turns: list[Turn] = []
        self.phases: list[str] = []
        self.waits: list[float] = []
        self._script, self._most_late, self._rng = script, most_late, np.random.default_rng(seed)
        self._coming: list[tuple[int, TurnReply]] = []

    def __call__(self, done: int, total: int, phase: str) -> None:
        super().__call__(done, total, phase)
        self.phases.append(phase)

    point = "generate"

    def send(self, message: bytes) -> None:
        self.turns_ended(TurnsEnded.FromString(message).turns)

    def turns_ended(self, turns: Sequence[Turn]) -> None:
        self.turns += turns
        for turn in turns:
            if not turn.is_last:
                late = int(self._rng.integers(0, self._most_late + 1))
                self._coming.append((len(self.waits) + late, self._script(turn)))

    def receive(self, timeout_s: float) -> Sequence[bytes]:
        self.waits.append(timeout_s)
        there = [reply for due, reply in self._coming if due < len(self.waits)]
        self._coming = [(due, reply) for due, reply in self._coming if due >= len(self.waits)]
        self._rng.shuffle(there)  # type: ignore[arg-type]
        return [ReplyRequest(replies=[reply]).SerializeToString() for reply in there]


def converse(
    backend: RolloutBackend,
    rows: Batch,
    report: ScriptedReplies,
    *,
    max_response_length: int,
    temperature: float = 1.0,
    **conversation: Any,
) -> list[DecodingStep]:
    """Samples conversations with a backend alone; returns its steps. Row r, sample s has place 100 r + s.

    Rows with the column `places` keep their own. `conversation` has fields of the message of that name.
    """
    request = generate_request(
        max_response_length=max_response_length, conversation=conversation_pb2.Conversation(**conversation)
    )
    if "places" not in rows:
        places = [[100 * row + sample for sample in range(num)] for row, num in enumerate(rows["seeds"].lengths)]
        rows = rows.merge(Batch.from_rows(places=places))
    open_turns = RankTurns(request, report)
    steps = []
    sampling = Sampling(temperature, 1.0, 0, max_response_length)
    for step in backend.generate(rows, sampling, report.is_cancelled, open_turns):
        open_turns.announce(step)
        steps.append(step)
    return steps


def responses_of(steps: Sequence[DecodingStep]) -> list[Response]:
    """Returns the responses of all steps by index."""
    return sorted((response for step in steps for response in step.ended), key=lambda response: response.index)
