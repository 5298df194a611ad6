"""Which context of a conversation a request belongs to.

A request has a whole history. It is compared, message by message and in a normal form (`Question.prefixes`), with the
histories that the policy has answered in this conversation:

    an answered history, and messages of roles user and tool    they follow the turn that answered it, exactly: what
                                                                the policy has said is never tokenised again
    anything else                                               a context that begins anew with the request's messages
"""

from dataclasses import dataclass

from environments.chat import REPLYING_ROLES, Turn
from environments.gateway.questions import Answered, Question, digest_with
from environments.gateway.template_messages import assistant_message, template_call
from environments.messages import Message

_MAX_SHOWN = 60  # characters of a text in a reason


@dataclass(frozen=True)
class Place:
    """Where a question is asked: after the latest turn, after an earlier one, or in a context that begins anew.

    Attributes:
        follows: the turn that `messages` follow; None: they are a context that begins anew.
        messages: those of the question that the policy has not seen there.
        why: the reason why a context begins, as a clause; empty if the question follows the latest turn.
    """

    follows: Turn | None
    messages: tuple[Message, ...]
    why: str = ""

    @property
    def after(self) -> Turn | None:
        """The turn that the question follows if a later one has been said, see `Chat.turn`; else None."""
        return self.follows if self.why else None


@dataclass(frozen=True)
class _Known:
    """A history that was answered: its messages with the answer, and the answer's turn."""

    messages: tuple[Message, ...]
    turn: Turn


class History:
    """The questions of a conversation that the policy has answered, with its answers."""

    def __init__(self) -> None:
        self._answered: dict[bytes, _Known] = {}  # by the digest of a history that ends with an answer; the latest one
        self._touched: dict[bytes, _Known] = {}  # by the digest of any prefix of such a history
        self._latest: _Known | None = None

    def place(self, question: Question) -> Place:
        """Returns where a question is asked: after the longest answered history that it begins with, or anew."""
        for length in range(len(question.messages) - 1, 0, -1):
            if question.messages[length]["role"] not in REPLYING_ROLES:
                break
            known = self._answered.get(question.prefixes[length])
            if known is not None:
                why = "" if known is self._latest else self._why_it_returns(known)
                return Place(known.turn, question.messages[length:], why)
        return Place(None, question.messages, self._why_anew(question))

    def add(self, question: Question, answered: Answered) -> None:
        """Takes the answer to a question."""
        calls = [template_call(call.id, call.name, call.arguments) for call in answered.calls]
        message = assistant_message(answered.text, calls)
        prefixes = (*question.prefixes, digest_with(question.prefixes[-1], message))
        same = self._num_same(question)
        # Messages that many requests have are kept once.
        before = self._touched[question.prefixes[same]].messages[:same] if same else ()
        known = _Known((*before, *question.messages[same:], message), answered.turn)
        self._answered[prefixes[-1]] = known
        self._touched.update(dict.fromkeys(prefixes, known))
        self._latest = known

    def _num_same(self, question: Question) -> int:
        """Returns how many messages of a request are those of a history that was answered."""
        same = [length for length, prefix in enumerate(question.prefixes) if prefix in self._touched]
        return max(same, default=0)

    def _why_it_returns(self, known: _Known) -> str:
        assert self._latest is not None
        return f"the history is that of turn {known.turn.number}, the latest turn is {self._latest.turn.number}"

    def _why_anew(self, question: Question) -> str:
        """Returns the first difference between a request and the histories that were answered."""
        if self._latest is None:
            return "nothing was answered before"
        if question.prefixes[0] not in self._touched:
            return "its tools are others than those of the requests before"
        same = self._num_same(question)
        if same == len(question.messages):
            return "the same history was answered before"
        known = self._touched[question.prefixes[same]]
        asked = _shown(question.messages[same])
        if same == len(known.messages):
            return f"message {same + 1} is {asked}; expected one of the user or of a tool after the policy's answer"
        return f"message {same + 1} is {asked}; before, it was {_shown(known.messages[same])}"


def _shown(message: Message) -> str:
    """Describes a message in a few words."""
    text = message["content"]
    names = [call["function"]["name"] for call in message.get("tool_calls", ())]
    calls = f" with calls of {', '.join(map(repr, names))}" if names else ""
    of_call = f" to {message['tool_call_id']!r}" if "tool_call_id" in message else ""
    return f"{message['role']}{of_call} {text[:_MAX_SHOWN]!r}{'...' * (len(text) > _MAX_SHOWN)}{calls}"[:200]
