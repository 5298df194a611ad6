"""The messages between the controller and an environment process.

Environment processes import this module, so it imports nothing heavy.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from splitppo.config.subsections.code import CodeConfig
from splitppo.config.subsections.multi_turn import MultiTurnConfig

Message = Mapping[str, Any]  # of a chat: role, content, and what a role has besides
Schemas = Sequence[Mapping[str, Any]]  # of tools, as chat templates take them
# What ended a turn: the model itself or a stop text, a limit of the turn or of the response, the end of its context.
EndedBy = Literal["stop", "length", "context"]

# Shared memory of a process, where its conversations are marked: MARKS bytes that say which call of the turn is made,
# then MARKS bytes that say whether code of the user's runs at this moment. A conversation's place is its id % MARKS.
MARKS = 65_536
NO_CALL = 0  # nothing, or code of the user's that is no call of a tool; the calls of a turn are 1, 2, ...

TIMED_OUT = "timed out"  # the reply to a call that took too long
MAX_TEXT_BYTES = 2**20  # of a message
MAX_STOP_TEXTS = 16  # of one turn, beside those of the run
_MAX_STOP_CHARACTERS = 1_000


def without_surrogates(text: str) -> str:
    """Returns a text with "?" for what UTF-8 cannot encode."""
    return text.encode("utf-8", "replace").decode()


def _is_stop_text(text: object) -> bool:
    """Returns True if a text may end a turn: it is neither empty nor long, and UTF-8 can encode it."""
    is_text = isinstance(text, str) and 0 < len(text) <= _MAX_STOP_CHARACTERS
    return is_text and text == without_surrogates(str(text))


@dataclass(frozen=True)
class Room:
    """The tokens that are left after a turn: in its context, and in the response with all of its contexts."""

    context: int
    response: int


@dataclass(frozen=True)
class TurnLimits:
    """The limits of one turn, beside those of the run.

    Attributes:
        max_tokens: the most tokens that the turn may sample; None: no limit of its own.
        stop: texts that end the turn, beside those of `rollout.stop`.
        with_log_probs: True if `Said.log_probs` of the turn is wanted.
    """

    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    with_log_probs: bool = False

    def __post_init__(self) -> None:
        """Checks the limits; ValueError: a value is out of its range."""
        if self.max_tokens is not None and (type(self.max_tokens) is not int or self.max_tokens < 1):
            raise ValueError(f"max_tokens: expected a whole number of at least 1, or None, got {self.max_tokens!r}")
        texts = self.stop if isinstance(self.stop, tuple) else (None,)
        if len(texts) > MAX_STOP_TEXTS or not all(map(_is_stop_text, texts)):
            expected = f"a tuple of at most {MAX_STOP_TEXTS} texts, of 1 to {_MAX_STOP_CHARACTERS:,} characters each"
            raise ValueError(f"stop: expected {expected}, got {ascii(self.stop)[:200]}")


@dataclass(frozen=True)
class Answer:
    """The environment's answer to a turn of the model.

    Attributes:
        messages: the chat messages that follow the turn; after reset none, or one of the user with what it returned.
        begins_context: True if `messages` are a whole context, after which the model sees nothing that was before;
            before the first turn they replace the prompt.
        tools: the JSON schemas of the tools of a context that begins; None: those of the environment.
        after_turn: the number of the turn, from 1, that `messages` follow, in a context of the tokens up to that turn;
            None: the latest turn, in its own context.
        limits: the limits of the turn that is asked for.
        is_over: True if there is no further turn.
        reward: the sum of what was given for the latest turn since the last answer; None if nothing was.
        final: what get_reward returned, with "score" and any further fields, once the conversation is over.
        notes: numbers of `Chat.note`, for metrics.
        num_calls: the calls that the turn has, bad ones and those that were not made included.
        num_bad_calls, num_tool_errors, num_timeouts: how many of them were no call of a tool, failed, took too long.
        num_crashes: how many of the calls that failed ended their process.
        num_overlapping: the requests of an agent that came before those before them were answered.
        text: the turn up to its first call.
        calls: the calls that could be read, as the template's "tool_calls" of the assistant's message.
        tool_error: the first failure of a tool, as "name: message"; empty if none failed.
        agent_error: why an agent failed after an answer of the policy, which may be the cause; empty if none did.
        agent_is_wrong: True if an agent would fail whatever the policy says: its rewards are of a wrong kind, or its
            request is written wrongly.
        lost: the reason why the environment failed, one sentence; empty if it did not.
        timed_out_calls: the calls (from 1) that took too long, so that they are not made again.
        privileged: in the first answer, what the critic alone may learn (`critic.privileged_prompt`), as texts by name.
    """

    messages: tuple[Message, ...] = ()
    begins_context: bool = False
    tools: Schemas | None = None
    after_turn: int | None = None
    limits: TurnLimits = TurnLimits()
    is_over: bool = False
    reward: float | None = None
    final: Mapping[str, Any] | None = None
    notes: Mapping[str, float] = field(default_factory=dict)
    num_calls: int = 0
    num_bad_calls: int = 0
    num_tool_errors: int = 0
    num_timeouts: int = 0
    num_crashes: int = 0
    num_overlapping: int = 0
    text: str = ""
    calls: tuple[Mapping[str, Any], ...] = ()
    tool_error: str = ""
    agent_error: str = ""
    agent_is_wrong: bool = False
    lost: str = ""
    timed_out_calls: tuple[int, ...] = ()
    privileged: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Said:
    """A turn of the model, as text.

    Attributes:
        room: the tokens that are left after it; None: nobody has counted them.
        num_context_tokens: the tokens that the model saw when the turn began.
        num_tokens: the tokens of the turn.
        log_probs: the text of each token and its log-prob in nats, if the answer before asked for them.
    """

    text: str
    ended_by: EndedBy
    room: Room | None = None
    num_context_tokens: int = 0
    num_tokens: int = 0
    log_probs: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class NoRoom:
    """Tells in the place of a turn that an answer and one token do not fit into the context, so nothing was said.

    Attributes:
        room: the tokens that were left before.
        num_tokens: the tokens that the answer has.
    """

    room: Room
    num_tokens: int


@dataclass(frozen=True)
class Begin:
    """The beginning of a conversation, also of one that is repeated in another process.

    Attributes:
        environment: a key of `rollout.multi_turn.environments`.
        skipped: the replies to calls that are not made again, by turn and call, both from 1.
        told: the answers of before, if the conversation is repeated.
    """

    environment: str
    row: Mapping[str, Any]
    seed: int
    skipped: Mapping[tuple[int, int], str]
    told: tuple[Answer, ...] = ()


@dataclass(frozen=True)
class Request:
    """A message to a conversation of a process.

    Attributes:
        turns: turns that are answered one after the other, or `NoRoom` in their place; None: the model has no further
            turn.
        begin: given if the conversation begins; then there is one answer more, to reset.
        is_abandoned: True if nobody waits for an answer any more.
    """

    conversation: int
    turns: Sequence[Said | NoRoom | None] = ()
    begin: Begin | None = None
    is_abandoned: bool = False


@dataclass(frozen=True)
class Reply:
    """The answers to a request, and how many calls of this process took too long and still run."""

    conversation: int
    answers: Sequence[Answer]
    num_stuck: int


@dataclass(frozen=True)
class Setup:
    """The settings that an environment process starts with.

    Attributes:
        tool_format: how the model writes calls, "auto" resolved; None: in no known way.
        output: the file that gets what the user's code prints; None: the controller's error output.
        code: the sandboxes of this process, in which programs of the model run.
        is_start: True at the start of a run, when servers must be there.
        asks_privileged: True if environments are asked what only the critic may learn.
    """

    config: MultiTurnConfig
    tool_format: str | None
    output: Path | None
    code: CodeConfig
    is_start: bool = True
    asks_privileged: bool = False
