"""The questions of a conversation that wait for the policy, in the order in which they are asked."""

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from environments.gateway.history import History
from environments.gateway.questions import Outcome, Question, Refused
from environments.messages import Answer

log = logging.getLogger(__name__)

_ORDER_S = 20.0  # a program that is repeated asks what it asked before within this time
_MAX_WAITING = 512
_MAX_WAITING_BYTES = 32 << 20
_MESSAGE_BYTES = 512  # that a message takes beside its text


@dataclass(eq=False)
class Exchange:
    """The outcome of a question of the program's, and who waits for it.

    Attributes:
        listeners: the open connections that wait for the outcome.
        is_told: True if the outcome was written to one of them.
    """

    outcome: "asyncio.Future[Outcome]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    listeners: set[object] = field(default_factory=set)
    is_told: bool = False

    @property
    def is_owed(self) -> bool:
        """True if no program has the outcome or waits for it: the connection broke, or the program began again."""
        return not self.is_told and not self.listeners

    def leave(self, listener: object, *, is_told: bool) -> None:
        """Removes a listener, and notes whether it was told the outcome.

        Once the program has been started again, what an earlier listener was told does not count.
        """
        if listener in self.listeners:
            self.listeners.remove(listener)
            self.is_told |= is_told


class Line:
    """The questions that wait, the oldest first.

    Attributes:
        questions: the questions, by their exchanges, also the one that is asked at the moment.
    """

    def __init__(self, told: Sequence[Answer], name: str) -> None:
        """Makes a line without questions; `told` is what the model was told before a conversation is repeated."""
        self.questions: dict[Exchange, Question] = {}
        self._told = deque(told)
        self._name = name
        self._has_grown = asyncio.Event()
        self._has_overlapped = False

    def add(self, question: Question) -> Exchange:
        """Adds a question; Refused: too many wait, or what waits would take too much memory."""
        if len(self.questions) >= _MAX_WAITING:
            raise Refused(429, "too_many_requests", f"{_MAX_WAITING} requests of this conversation wait already")
        num_bytes = sum(map(_num_bytes, self.questions.values()))
        if self.questions and num_bytes + _num_bytes(question) > _MAX_WAITING_BYTES:
            waiting = f"{len(self.questions)} requests of this conversation wait already"
            raise Refused(429, "too_many_requests", f"{waiting}, and have {num_bytes:,} bytes")
        if self.questions and not self._has_overlapped:
            log.info("%s: requests overlap; they are asked in the order in which they arrive", self._name)
            self._has_overlapped = True
        exchange = Exchange()
        self.questions[exchange] = question
        self._has_grown.set()
        return exchange

    async def next(self, history: History) -> Exchange:
        """Returns the question that is asked next: the oldest one.

        While the conversation is repeated, it is the one that was asked at this place before, and others wait for it.
        If that one does not come in time, the program asks otherwise than before, and from then on it is the oldest.
        """
        while self._told:
            told = self._told[0]
            asked = self.questions.items()
            found = next((one for one, question in asked if _is_what_was_told(question, told, history)), None)
            if found is not None:
                self._told.popleft()
                return found
            self._has_grown.clear()
            try:
                async with asyncio.timeout(_ORDER_S):
                    await self._has_grown.wait()
            except TimeoutError:
                log.info("%s: the program asks otherwise than before", self._name)
                self._told.clear()
        return next(iter(self.questions))

    def leave(self, exchange: Exchange, outcome: Outcome) -> None:
        """Removes a question, and gives its outcome to all who wait for it."""
        del self.questions[exchange]
        exchange.outcome.set_result(outcome)

    def end(self, refused: Refused) -> None:
        """Refuses all that wait."""
        for exchange in list(self.questions):
            self.leave(exchange, refused)


def _num_bytes(question: Question) -> int:
    """Returns about how much memory a question takes while it waits."""
    return question.num_bytes + _MESSAGE_BYTES * len(question.messages)


def _is_what_was_told(question: Question, told: Answer, history: History) -> bool:
    """Returns True if a question is asked in just the words, and at the place, of what the model was told before."""
    place = history.place(question)
    after_turn = None if place.after is None else place.after.number
    begins_anew = place.follows is None
    is_same_context = told.begins_context == begins_anew and told.after_turn == after_turn
    asked = Question(place.messages, question.tools if begins_anew else ())
    asked_before = Question(tuple(told.messages), told.tools or ())
    is_same_text = asked.prefixes[-1] == asked_before.prefixes[-1]
    return is_same_context and is_same_text and told.limits == question.limits
