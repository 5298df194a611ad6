"""Prints a conversation as it happens: the text of each piece, its tokens, rewards, and the room that is left."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from controller.conversations.conversation import Conversation
from controller.data.tokenizer import Tokenizer
from environments.messages import Answer
from splitppo.config import Config
from splitppo.printable import printable
from splitppo.v1.conversation_pb2 import Turn, TurnReply

_COUNTS = {
    "num_calls": "calls",
    "num_bad_calls": "bad calls",
    "num_tool_errors": "errors of tools",
    "num_timeouts": "calls that took too long",
    "num_crashes": "calls that ended their process",
}


@dataclass(frozen=True)
class Piece:
    """Tokens that came together: a context that begins, a turn of the model, or what follows a turn."""

    title: str
    tokens: Sequence[int]


class Transcript:
    """Prints the pieces of one conversation, and counts the tokens of its response and of its present context."""

    def __init__(self, config: Config, tokenizer: Tokenizer, *, shows_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._shows_tokens = shows_tokens
        self._limits = (config.longest_context, config.data.max_response_length)
        self._context: list[Piece] = []
        self._num_response = 0  # tokens of the response
        self._num_sampled = 0  # those of them in turns
        self._rewards = 0.0

    def line(self, text: str) -> None:
        """Prints a line of its own."""
        sys.stdout.write(f"{printable(text)}\n")
        sys.stdout.flush()

    def prompt(self, tokens: Sequence[int]) -> None:
        """Prints the prompt, with what the environment said when it began."""
        self._context = []
        self._add(Piece("prompt", tokens))

    def turn(self, turn: Turn) -> None:
        """Prints a turn of the model, which has ended."""
        self._num_response += len(turn.tokens)
        self._num_sampled += len(turn.tokens)
        self._add(Piece(f"turn {turn.turn}", turn.tokens))

    def reply(self, reply: TurnReply) -> None:
        """Prints what follows a turn: nothing, tokens after it, or a context that begins anew."""
        if reply.is_last:
            return
        self._num_response += len(reply.tokens)
        if reply.begins_context:
            self._context = []
            self._add(Piece("a context begins anew, and the model sees nothing before it", reply.tokens))
        else:
            self._add(Piece("what follows", reply.tokens))

    def answer(self, answer: Answer) -> None:
        """Prints what the environment gave beside messages: rewards, notes, what calls did, and its end."""
        self._rewards += answer.reward or 0.0
        facts = ", ".join(_facts(answer, self._rewards))
        if facts:
            self.line(f"    [{facts}]")

    def tokens(self) -> None:
        """Prints each token of the present context, with its text."""
        for piece in self._context:
            self.line(f"  {piece.title}:")
            self._print_tokens(piece)

    def over(self, talk: Conversation, of_scorers: float | None, score: float) -> None:
        """Prints how the conversation ended, and its score; `of_scorers` is what scorers gave, None without any."""
        turns = "turn" if talk.num_turns == 1 else "turns"
        self.line(
            f"=== over: ended by {talk.ended_by} after {talk.num_turns} {turns}; the response has"
            f" {self._num_response} tokens, {self._num_sampled} of them in turns"
        )
        rewards = ", ".join(f"{reward:g}" for reward in talk.turn_rewards)
        scorers = "" if of_scorers is None else f"; of the scorers: {of_scorers:g}"
        self.line(f"rewards of the turns: {rewards or 'none'}; at the end: {talk.end_score:g}{scorers}")
        if talk.extra:
            self.line(f"fields: {_fields(talk.extra)}")
        self.line(f"score: {score:g}")

    def _add(self, piece: Piece) -> None:
        """Adds a piece to the present context, and prints it under a line with its length and the room behind it."""
        self._context.append(piece)
        length = f"{len(piece.tokens)} {'token' if len(piece.tokens) == 1 else 'tokens'}"
        self.line(f"--- {piece.title}: {length}; {self._room()}")
        if self._shows_tokens:
            self._print_tokens(piece)
            return
        text = self._tokenizer.backend.decode(list(piece.tokens), skip_special_tokens=False)
        for line in text.split("\n"):
            self.line(f"    {line}")

    def _room(self) -> str:
        """Returns how many tokens are left: in the response, and in the present context if fewer are left there."""
        longest_context, longest_response = self._limits
        response = longest_response - self._num_response
        context = longest_context - sum(len(piece.tokens) for piece in self._context)
        left = f"{response} left in the response"
        return f"{context} left in the context, {left}" if context < response else left

    def _print_tokens(self, piece: Piece) -> None:
        backend = self._tokenizer.backend
        for token in piece.tokens:
            self.line(f"    {token:>7}  {backend.decode([token], skip_special_tokens=False)!r}")


def _facts(answer: Answer, rewards: float) -> Iterator[str]:
    """Yields what an answer of an environment says beside its messages; `rewards` is the sum so far."""
    if answer.reward is not None:
        yield f"reward {answer.reward:g}, {rewards:g} so far"
    for name, what in _COUNTS.items():
        if count := getattr(answer, name):
            yield f"{what}: {count}"
    if answer.tool_error:
        yield answer.tool_error
    if answer.agent_error:
        yield f"the agent failed: {answer.agent_error}"
    if answer.notes:
        yield f"notes: {_fields(answer.notes)}"
    if answer.final is not None:
        yield f"at the end: {_fields(answer.final)}"
    if answer.is_over and not answer.lost:
        yield "the environment has ended"


def _fields(fields: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in fields.items())
