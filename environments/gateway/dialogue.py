"""The requests of one conversation: which of them are repeats, and the others asked of the policy, one at a time."""

import asyncio
import logging
from dataclasses import replace

from environments.chat import Chat, ContextFull, ConversationOver, Turn
from environments.gateway.history import History
from environments.gateway.line import Exchange, Line
from environments.gateway.questions import Answered, Outcome, Question, Refused, bad_request
from environments.messages import Answer
from environments.tools import reason_of

MAX_LATE = 10  # requests of a program that has not noticed yet that the policy says no more

log = logging.getLogger(__name__)


class Dialogue:
    """All that a program asks in one conversation, in the order in which its requests arrive.

    A request that has arrived is asked, also if its connection breaks meanwhile: what the policy is asked depends on
    the requests alone, not on how long the program waited.

    Attributes:
        began: set as soon as the first question is asked of the policy.
        is_over: set if the policy has no further turn, or `failure` is set.
        failure: what the conversation failed by; None: it has not.
        asks_on: set if the program has asked 10 times more after it was told so; see `is_over`.
        refused: why the latest request was refused, as it is written wrongly; empty: it was not.
    """

    def __init__(self, chat: Chat, name: str) -> None:
        self.began = asyncio.Event()
        self.is_over = asyncio.Event()
        self.asks_on = asyncio.Event()
        self.failure: Exception | None = None
        self.refused = ""
        self._chat = chat
        self._name = name
        self._history = History()
        self._exchanges: dict[bytes, list[Exchange]] = {}  # by the key of the question, in order of arrival
        self._line = Line(chat.told, name)
        self._asking: asyncio.Task[None] | None = None
        self._num_late = 0  # requests that came when it was over
        self._why_over = "the conversation has ended"

    def take(self, question: Question, *, is_retry: bool) -> Exchange:
        """Takes a request: returns the exchange that it repeats, or a new one that is asked when its turn comes.

        Whoever waits for the outcome is one of its `listeners`, from now on.

        It repeats an equal request whose answer no program has. A client that says that it tries again (`is_retry`)
        means the latest equal request, if each of them was answered. Any other equal request is another question.

        Raises:
            Refused: the conversation is over, or too many requests wait.
        """
        equal = self._exchanges.setdefault(question.key, [])
        owed = next((one for one in equal if one.is_owed), None)
        if owed is not None:
            return owed
        if is_retry and equal:
            return equal[-1]
        if self.is_over.is_set():
            self._num_late += 1
            if self._num_late == MAX_LATE:
                self.asks_on.set()
            raise self._over()
        exchange = self._line.add(question)
        equal.append(exchange)
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask_all())
        else:
            pending = self._chat.pending
            self._chat.pending = replace(pending, num_overlapping=pending.num_overlapping + 1)
        return exchange

    def restarted(self) -> None:
        """The program was started again: its requests get the answers to the equal ones of before, in order."""
        for equal in self._exchanges.values():
            for exchange in equal:
                exchange.is_told = False
                exchange.listeners.clear()

    def close(self) -> None:
        """Ends the conversation; requests that wait are refused."""
        self.is_over.set()
        if self._asking is not None:
            self._asking.cancel()
        self._line.end(self._over())

    async def _ask_all(self) -> None:
        """Asks the questions that wait, one after the other."""
        while self._line.questions:
            exchange = await self._line.next(self._history)
            try:
                outcome: Outcome = await self._ask(self._line.questions[exchange])
            except ContextFull as full:
                outcome = Refused(400, "context_length_exceeded", f"prompt is too long: {full}")
            except ValueError as error:
                outcome = bad_request(str(error))
            except ConversationOver:
                self._end("the policy has no further turn in this conversation")
                break
            except Exception as error:  # noqa: BLE001 - a parser of the user's may raise anything
                self.failure = error
                self._end(f"the conversation failed: {reason_of(error)}")
                break
            self._line.leave(exchange, outcome)

    async def _ask(self, question: Question) -> Answered:
        """Asks one question where it belongs, and returns the answer."""
        place = self._history.place(question)
        if place.why and self.began.is_set():
            log.info("%s: a context begins: %s", self._name, place.why)
        self.began.set()
        if place.follows is None:
            turn = await self._chat.restart(*place.messages, tools=question.tools, limits=question.limits)
        else:
            turn = await self._chat.turn(*place.messages, after=place.after, limits=question.limits)
        answered = _answered(turn, self._chat.pending.text, question)
        if turn.calls and not answered.calls:
            self._chat.pending = _with_text_alone(self._chat.pending, turn, question)
        self._history.add(question, answered)
        return answered

    def _end(self, why: str) -> None:
        self._why_over = why
        self.is_over.set()
        self._line.end(self._over())

    def _over(self) -> Refused:
        return Refused(403, "conversation_over", self._why_over)


def _answered(turn: Turn, text_before_calls: str, question: Question) -> Answered:
    """Returns what the program is told of the turn that answered a question.

    If the question wants no calls, or one of the turn's calls is broken, the whole turn is text.
    """
    are_calls_told = question.reads_calls and not any(call.error for call in turn.calls)
    if turn.calls and are_calls_told:
        return Answered(turn, text_before_calls, turn.calls)
    found = [(turn.text.find(stop), stop) for stop in question.limits.stop if stop in turn.text]
    if not found:
        return Answered(turn, turn.text)
    end, stop = min(found)
    return Answered(turn, turn.text[:end], stop=stop)


def _with_text_alone(pending: Answer, turn: Turn, question: Question) -> Answer:
    """Returns what is told of a turn whose calls the program is not told: the turn is text for scorers, too."""
    calls = turn.calls if question.reads_calls else ()
    num_bad_calls = sum(bool(call.error) for call in calls)
    return replace(pending, text="", calls=(), num_calls=len(calls), num_bad_calls=num_bad_calls)
