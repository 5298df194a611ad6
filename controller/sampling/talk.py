"""The conversations of a batch of responses with their environments, turn by turn.

    sampling group                     controller                       environment process
    a turn ends     -- Turn ------->   decode the turn's tokens
                                       Episode.say  -- text -------->   converse(chat, row)
                                                    <- messages -----   ... await chat.turn(...)
    the row goes on <- TurnReply ---   tokens of the messages

Every response has a coroutine of its own, `Talk.converse`, in which a turn is read from top to bottom. `TurnInbox`
is the controller's end of a group's open turns: those that have ended and wait for their replies.
"""

import asyncio
from collections.abc import Awaitable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from controller.conversations.conversation import Conversation
from controller.conversations.environments import Environments
from controller.data.prompt_files import PromptRow
from controller.data.prompts import PromptBatch, response_seeds
from controller.workers.clients import SamplingClient
from controller.workers.concurrency import gather_calls
from environments.messages import Answer
from environments.pool import Episode
from environments.record import RecordedStep
from splitppo.clock import unix_s
from splitppo.rpc.errors import WrongState
from splitppo.run_folder.spans import Span
from splitppo.v1 import conversation_pb2
from splitppo.v1.batch_pb2 import Slot
from splitppo.v1.conversation_pb2 import Turn, TurnReply, TurnsEnded

# Environments get seeds that every random number generator takes.
_SEED_BITS = 31
# Shorter pauses between two times in which environments work are no pause in the timeline.
_PAUSE_S = 0.01
_COUNTS = ("num_calls", "num_bad_calls", "num_tool_errors", "num_timeouts", "num_crashes")


class TurnInbox:
    """The controller's end of a group's open turns, in one attempt: a turn that has ended waits here for its reply.

    A row is the index of a response among those of the group.
    """

    def __init__(self, client: SamplingClient, slot: Slot, num_rows: int) -> None:
        self._client = client
        self._slot = slot
        self._ended: list[asyncio.Queue[Turn]] = [asyncio.Queue() for _ in range(num_rows)]
        self._num_ended = [0] * num_rows
        self._replies: list[TurnReply] = []
        self._sending = asyncio.Lock()

    def end(self, ended: TurnsEnded) -> None:
        """Takes turns that have ended; a turn that is told again is ignored."""
        for turn in ended.turns:
            if turn.turn == self._num_ended[turn.place] + 1:
                self._num_ended[turn.place] += 1
                self._ended[turn.place].put_nowait(turn)

    async def next_of(self, row: int) -> Turn:
        """Returns the next turn of a row as soon as it has ended."""
        return await self._ended[row].get()

    async def reply(self, turn: Turn, tokens: Sequence[int]) -> None:
        """Sends the tokens that follow a turn; none ends the response. All replies that are there go together."""
        reply = TurnReply(place=turn.place, turn=turn.turn, tokens=tokens, is_last=not len(tokens))
        self._replies.append(reply)
        await asyncio.sleep(0)  # others have their replies at the same time
        if not self._replies:  # another call has taken this one along
            return
        async with self._sending:
            replies = self._replies
            self._replies = []
            if replies:
                with suppress(WrongState):  # Generate has ended, or was cancelled: its own reply says how
                    await self._client.reply(self._slot, replies)


@dataclass(eq=False)
class _Said:
    """One conversation so far, in the words of the policy and of its environment.

    Attributes:
        about: the row of the prompt.
        first: how the environment began.
        length: the tokens of the response so far.
        answers: all answers of the environment, with the first one.
        Others: see `Conversation`.
    """

    about: PromptRow
    first: Answer
    length: int = 0
    turn_ends: list[int] = field(default_factory=list)
    turn_rewards: list[float] = field(default_factory=list)
    messages: list[Any] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    last_turn: str = ""
    is_truncated: bool = False
    ended_by: str = "turns"

    def __post_init__(self) -> None:
        self.answers.append(self.first)
        if self.first.is_over:
            self.ended_by = "environment"

    def add_turn(self, num_tokens: int) -> None:
        """Adds a turn of the policy. What the environment gave before turn 1 belongs to that turn."""
        self.turn_rewards.append(0.0 if self.turn_ends else self.first.reward or 0.0)
        self.length += num_tokens
        self.turn_ends.append(self.length - 1)

    def add_answer(self, answer: Answer) -> None:
        """Adds an answer of the environment, its reward to the latest turn."""
        self.answers.append(answer)
        self.turn_rewards[-1] += answer.reward or 0.0

    def add_text(self, text: str, answer: Answer) -> None:
        """Adds the text of the latest turn as a message, with the calls of tools that the environment read in it."""
        self.last_turn = text
        if answer.calls:
            self.messages.append({"role": "assistant", "content": answer.text, "tool_calls": list(answer.calls)})
        else:
            self.messages.append({"role": "assistant", "content": text})

    def conversation(self) -> Conversation:
        """Returns the conversation, which is over."""
        final = dict(next((answer.final for answer in self.answers if answer.final is not None), {}))
        notes = {name: value for answer in self.answers for name, value in answer.notes.items()}
        return Conversation(
            turn_rewards=tuple(self.turn_rewards),
            turn_ends=tuple(self.turn_ends),
            end_score=float(final.pop("score", 0.0)),
            extra={**notes, **final},
            messages=tuple(self.messages),
            is_truncated=self.is_truncated,
            tool_error=next((answer.tool_error for answer in self.answers if answer.tool_error), ""),
            last_turn=self.last_turn,
            lost=next((answer.lost for answer in self.answers if answer.lost), ""),
            beginning=self.about.observation,
            ended_by="length" if self.is_truncated else self.ended_by,
            is_rewarded=any(answer.reward is not None or answer.final is not None for answer in self.answers),
            **{name: sum(getattr(answer, name) for answer in self.answers) for name in _COUNTS},
        )


class Talk:
    """The conversations of B responses, one environment each; an async context manager that begins and ends them.

    On entering, the texts by which the environments begin are added to the prompts (`prompts_B`).
    """

    def __init__(
        self,
        environments: Environments,
        prompts_B: PromptBatch,
        seeds_B: NDArray[np.int64],
        record: RecordedStep | None,
    ) -> None:
        self.prompts_B = prompts_B
        self._environments = environments
        self._seeds_B = seeds_B
        self._record = record
        self._begun: dict[int, tuple[Episode, Answer]] = {}  # by place, and not yet in a conversation
        self._beginnings: list[str] = []  # the texts by which the environments have begun
        self._times = _TimesOfWork()

    @classmethod
    def about(
        cls,
        environments: Environments | None,
        prompts_B: PromptBatch,
        run_seed: int,
        step: int,
        names: Sequence[str] = (),
    ) -> Self | None:
        """Makes the conversations of responses, one for each prompt here; None if there are no environments.

        All samples of a prompt have environments of the same seed, so that they begin in the same state. `names` are
        those of the responses in the record of the step; without names nothing is written.
        """
        if environments is None:
            return None
        seeds_B = response_seeds(run_seed, step, prompts_B.row_indices, 0) >> (63 - _SEED_BITS)
        record = None if environments.record is None else environments.record.at_step(step, names)
        return cls(environments, prompts_B, seeds_B, record)

    async def __aenter__(self) -> Self:
        """Starts the environment of every response."""

        async def begin(place: int) -> str:
            self._begun[place] = await self._begin(place)
            return _text_of(self._begun[place][1])

        try:
            self._beginnings = await gather_calls(*map(begin, range(len(self._seeds_B))))
            self.prompts_B = self._environments.with_beginnings(self.prompts_B, self._beginnings)
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *errors: object) -> None:
        """Ends environments with which nobody talked; waits until the record is on disk, before anybody learns."""
        for episode, _answer in self._begun.values():
            episode.abandon()
        self._begun.clear()
        if self._record is not None and errors == (None, None, None):
            await asyncio.to_thread(self._record.sync)

    async def converse(self, place: int, row: int, turns: TurnInbox) -> Conversation:
        """Leads the conversation of the response at a place of the batch to its end; it is this row of the group.

        One turn after the other: the policy's turn is told to the environment, and the tokens of the answer are sent as
        the reply, after which the group samples the next turn. A reply without tokens ends the response; a turn that
        fills the response takes no reply.
        """
        episode, first = await self._take_begun(place)
        said = _Said(self.prompts_B.rows[place], first)
        try:
            while True:
                turn = await turns.next_of(row)
                said.add_turn(len(turn.tokens))
                tokens = () if first.is_over else await self._answer_to(turn, episode, said)
                said.length += len(tokens)
                if not turn.is_last:
                    await turns.reply(turn, tokens)
                if not len(tokens):
                    return said.conversation()
        finally:
            episode.abandon()

    async def _answer_to(self, turn: Turn, episode: Episode, said: _Said) -> Sequence[int]:
        """Decodes a turn and tells it to the environment; returns the tokens of its answer.

        There are none if the environment has ended the conversation, or if the policy may say no more. Then the
        environment is told so, and answers for the last time.
        """
        environments = self._environments
        text = environments.tokenizer.decode(turn.tokens)
        has_stopped = environments.has_stopped(text, turn.tokens[-1])
        answer = await self._times.note(episode.say(text, "stop" if has_stopped else "length"))
        said.add_answer(answer)
        said.add_text(text, answer)
        said.is_truncated = turn.is_last and not has_stopped
        if answer.is_over:
            said.ended_by = "environment"
            return ()
        tokens: Sequence[int] = ()
        if turn.turn < environments.config.rollout.multi_turn.max_turns:
            tokens = self._tokens_of(answer, turn, said)
        if not len(tokens):
            said.add_answer(await self._times.note(episode.end()))
        return tokens

    def _tokens_of(self, answer: Answer, turn: Turn, said: _Said) -> Sequence[int]:
        """Returns the tokens of an answer's messages; none if they and one token more do not fit into the response."""
        environments = self._environments
        if turn.is_last:
            said.is_truncated = True
            return ()
        is_templated = environments.tokenizer.chat_template.applies_to(said.about.prompt)
        try:
            tokens = environments.turn_tokens.reply(
                answer.messages, last_token=turn.tokens[-1], is_templated=is_templated
            )
        except ValueError as error:  # e.g. two messages of the user that a coroutine said together
            lost = f"what followed turn {turn.turn} cannot be said to the model: {error}"
            said.add_answer(Answer(lost=lost))
            return ()
        if said.length + len(tokens) >= environments.config.data.max_response_length:
            said.is_truncated = True
            return ()
        said.messages += answer.messages
        return [int(token) for token in tokens]

    async def _take_begun(self, place: int) -> tuple[Episode, Answer]:
        """Returns the environment of a response, and how it began; begins it anew after the loss of a group."""
        if place in self._begun:
            return self._begun.pop(place)
        episode, answer = await self._begin(place)
        if _text_of(answer) != self._beginnings[place]:  # the prompt has the text of the first attempt
            where = self.prompts_B.rows[place].place
            return episode, Answer(is_over=True, lost=f"{where}: the environment began otherwise than before")
        return episode, answer

    async def _begin(self, place: int) -> tuple[Episode, Answer]:
        """Begins the environment of the response at `place`; returns its episode, and how it begins.

        In a step that is done again, the record replays what the environment said before. If the environment does not
        start, its episode is given up.
        """
        row = self.prompts_B.rows[place]
        seed = int(self._seeds_B[place])
        replay = None
        if self._record is not None:
            environment = self._environments.config.rollout.multi_turn.environment_of(row.data_source)
            replay = self._record.replay(place, [str(environment), row.prompt, row.fields, seed])
        episode = self._environments.processes.begin(row.data_source, row.fields, seed, replay)
        try:
            answer = await self._times.note(episode.start())
        except BaseException:
            episode.abandon()
            raise
        return episode, answer

    @property
    def request(self) -> conversation_pb2.Conversation:
        """The part of a Generate request that asks for conversations."""
        return self._environments.request

    def spans(self, step: int) -> list[Span]:
        """Returns the times in which at least one environment was asked, as spans of the timeline."""
        return [Span("environments", "environment", step, start, end) for start, end in self._times.times_s]


class _TimesOfWork:
    """Notes when at least one environment was asked: `times_s` has the beginning and the end of each such time."""

    def __init__(self) -> None:
        self.times_s: list[tuple[float, float]] = []  # unix seconds
        self._num_asked = 0

    async def note(self, asked: Awaitable[Answer]) -> Answer:
        """Awaits an environment's answer, and extends the latest stretch of work up to it.

        A new stretch begins only if no environment is being asked, and has not been for more than _PAUSE_S.
        """
        started_s = unix_s()
        self._num_asked += 1
        if self._num_asked == 1 and (not self.times_s or started_s - self.times_s[-1][1] > _PAUSE_S):
            self.times_s.append((started_s, started_s))
        try:
            return await asked
        finally:
            self._num_asked -= 1
            self.times_s[-1] = (self.times_s[-1][0], unix_s())


def _text_of(answer: Answer) -> str:
    return "".join(message["content"] for message in answer.messages)
