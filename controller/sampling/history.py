"""The tokens and the messages of one conversation so far, and the contexts in it.

    prompt | turn 1, reply, turn 2 | context 2, turn 3 | context 3, turn 4, reply, turn 5
             the response: one row

The first context is the prompt with the response up to where the second one begins. A later context begins with tokens
of its own, which stand in the response like those of a reply; what is sampled in it sees nothing that was before.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from environments.messages import Message, TurnLimits


@dataclass(frozen=True)
class Reply:
    """The tokens that follow a turn, and their messages; without tokens the conversation is over.

    Attributes:
        tokens: token ids, with `begins_context` those of the whole context.
        messages: the same as chat messages.
        num_said: how many of the tokens, the last ones, are new: those of an earlier turn's context are not.
        begins_context: True if the tokens begin a context anew.
        after_turn: the earlier turn, from 1, that a context goes back to; None: to none.
        is_templated: True if the chat template has written the context.
        limits: the limits of the turn that follows.
    """

    tokens: Sequence[int] = ()
    messages: Sequence[Message] = ()
    num_said: int = 0
    begins_context: bool = False
    after_turn: int | None = None
    is_templated: bool = True
    limits: TurnLimits = field(default_factory=TurnLimits)


class _Context(NamedTuple):
    """A context: where it begins in the response and among the messages, and what wrote it."""

    begin: int
    first_message: int
    is_templated: bool


class _Turn(NamedTuple):
    """The number of a turn's context, from 0, and where the turn ends in the response and among the messages."""

    context: int
    end: int
    message_end: int


@dataclass(eq=False)
class History:
    """The response to a prompt so far.

    Attributes:
        prompt: token ids of the prompt.
        prompt_messages: the prompt as chat messages.
        tokens: token ids of the response.
        messages: those of the response; the first one of a later context has "begins_context", and from there on they
            are whole: a context that goes back to an earlier turn begins with the messages up to it, the prompt's
            included.
        last_beginning: the tokens and messages of the response up to the end of those by which its latest context
            began; (0, 0): that of the prompt.
        num_returned: how many later contexts go back to an earlier turn.
    """

    prompt: Sequence[int]
    prompt_messages: Sequence[Message]
    tokens: list[int] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    last_beginning: tuple[int, int] = (0, 0)
    num_returned: int = 0
    _contexts: list[_Context] = field(default_factory=list)
    _turns: list[_Turn] = field(default_factory=list)

    @classmethod
    def of(cls, prompt: Sequence[int], messages: Sequence[Message], *, is_templated: bool) -> "History":
        """Returns the history of a response that has no tokens yet."""
        history = cls(prompt, messages)
        history._contexts.append(_Context(0, 0, is_templated))
        return history

    @property
    def turn_ends(self) -> list[int]:
        """The index of the last token of each turn in the response."""
        return [turn.end - 1 for turn in self._turns]

    @property
    def context_length(self) -> int:
        """The tokens of the latest context so far: all that the next one would follow."""
        before = 0 if len(self._contexts) > 1 else len(self.prompt)
        return before + len(self.tokens) - self._contexts[-1].begin

    def add_turn(self, tokens: Sequence[int]) -> None:
        """Adds the tokens of a turn of the policy; its message is the next one that is added."""
        self.tokens += tokens
        self._turns.append(_Turn(len(self._contexts) - 1, len(self.tokens), len(self.messages) + 1))

    def add_reply(self, reply: Reply) -> None:
        """Adds what follows the latest turn."""
        messages = [without_mark(message) for message in reply.messages]
        if reply.begins_context:
            self._contexts.append(_Context(len(self.tokens), len(self.messages), reply.is_templated))
            self.num_returned += reply.after_turn is not None
            messages[0] |= {"begins_context": True}
        self.tokens += reply.tokens
        self.messages += messages
        if reply.begins_context:
            self.last_beginning = len(self.tokens), len(self.messages)

    def last_token_of(self, turn: int) -> int:
        """Returns the last token of a turn, from 1."""
        return self.tokens[self._turns[turn - 1].end - 1]

    def is_templated(self, turn: int) -> bool:
        """Returns True if the chat template has written the context of a turn, from 1."""
        return self._contexts[self._turns[turn - 1].context].is_templated

    def tokens_up_to(self, turn: int) -> list[int]:
        """Returns the tokens of a turn's context, up to the end of the turn, from 1."""
        context, end, _ = self._turns[turn - 1]
        before = [] if context else list(self.prompt)
        return before + self.tokens[self._contexts[context].begin : end]

    def messages_up_to(self, turn: int) -> list[Message]:
        """Returns the messages of a turn's context, up to the turn, from 1, itself."""
        context, _, end = self._turns[turn - 1]
        before = [] if context else list(self.prompt_messages)
        messages = before + self.messages[self._contexts[context].first_message : end]
        return [without_mark(message) for message in messages]


def without_mark(message: Message) -> dict[str, Any]:
    """Returns a message without the mark that a context begins with it."""
    return {key: value for key, value in message.items() if key != "begins_context"}
