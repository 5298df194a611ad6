"""The conversations of a batch of responses with their environments, turn by turn.

    sampling group                     controller                       environment process
    a turn ends     -- Turn ------->   decode the turn's tokens
                                       Episode.say  -- text -------->   converse(chat, row)
                                                    <- messages -----   ... await chat.turn(...)
    the row goes on <- TurnReply ---   tokens of the messages

Every response has a coroutine of its own, `Talk.converse`, in which a turn is read from top to bottom. `TurnInbox`
is the controller's end of a group's open turns: those that have ended and wait for their replies.

A reply may begin a context anew, see history.py: with messages of the environment's, or with the very tokens up to an
earlier turn. What does not fit into the context is told to the environment (NoRoom), whose next answer takes its place;
what does not fit into the response ends the conversation.
"""

import asyncio
import logging
from collections.abc import Awaitable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Self

import numpy as np
from numpy.typing import NDArray

from controller.conversations.conversation import Conversation
from controller.conversations.environments import Environments
from controller.data.chat_template import as_messages
from controller.data.privileged_prompts import PrivilegedPrompts
from controller.data.prompt_files import PromptRow
from controller.data.prompts import PromptBatch, response_seeds
from controller.sampling.history import History, Reply
from controller.workers.clients import SamplingClient
from controller.workers.concurrency import gather_calls
from environments.messages import Answer, EndedBy, NoRoom, Room, TurnLimits
from environments.pool import Episode, what_was_said
from environments.record import RecordedStep
from splitppo.clock import unix_s
from splitppo.rpc.errors import WrongState
from splitppo.rpc.wire_format import divide
from splitppo.run_folder.spans import Span
from splitppo.v1 import conversation_pb2
from splitppo.v1.batch_pb2 import Slot
from splitppo.v1.conversation_pb2 import Turn, TurnReply, TurnsEnded

log = logging.getLogger(__name__)

# Environments get seeds that every random number generator takes.
_SEED_BITS = 31
# Shorter pauses between two times in which environments work are no pause in the timeline.
_PAUSE_S = 0.01
# The most bytes of a request with replies, far below the limit of gRPC.
_MAX_REQUEST_BYTES = 1 << 20
_MAX_INT32 = 2**31 - 1
# The answers in a row without room in the context, after which a conversation ends as truncated.
_MAX_REFUSED = 1000
_COUNTS = ("num_calls", "num_bad_calls", "num_tool_errors", "num_timeouts", "num_crashes", "num_overlapping")


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

    async def reply(self, turn: Turn, reply: Reply) -> None:
        """Sends what follows a turn. All replies that are there go together."""
        message = TurnReply(
            place=turn.place,
            turn=turn.turn,
            tokens=reply.tokens,
            is_last=not len(reply.tokens),
            begins_context=reply.begins_context,
            limits=limits_message(reply.limits),
        )
        self._replies.append(message)
        await asyncio.sleep(0)  # others have their replies at the same time
        if not self._replies:  # another call has taken this one along
            return
        async with self._sending:
            replies = self._replies
            self._replies = []
            with suppress(WrongState):  # Generate has ended, or was cancelled: its own reply says how
                for some in divide(replies, _MAX_REQUEST_BYTES):
                    await self._client.reply(self._slot, some)


def limits_message(limits: TurnLimits) -> conversation_pb2.TurnLimits | None:
    """Returns the limits of a turn as protobuf; None if there are none."""
    if limits.max_tokens is None and not limits.stop:
        return None
    return conversation_pb2.TurnLimits(max_tokens=min(limits.max_tokens or 0, _MAX_INT32), stop=limits.stop)


@dataclass(eq=False)
class _Said:
    """One conversation so far, in the words of the policy and of its environment.

    Attributes:
        about: the row of the prompt.
        first: how the environment began.
        history: prompt and response, with the contexts in it.
        limits: those of the latest turn.
        answers: all answers of the environment, with the first one.
        Others: see `Conversation`.
    """

    about: PromptRow
    first: Answer
    history: History
    limits: TurnLimits
    turn_rewards: list[float] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    last_turn: str = ""
    is_truncated: bool = False
    ended_by: str = "turns"

    def __post_init__(self) -> None:
        self.answers.append(self.first)
        if self.first.is_over:
            self.ended_by = "environment"

    def add_turn(self, tokens: Sequence[int]) -> None:
        """Adds a turn of the policy. What the environment gave before turn 1 belongs to that turn."""
        self.turn_rewards.append(0.0 if self.turn_rewards else self.first.reward or 0.0)
        self.history.add_turn(tokens)

    def add_answer(self, answer: Answer) -> None:
        """Adds an answer of the environment, its reward to the latest turn."""
        self.answers.append(answer)
        self.turn_rewards[-1] += answer.reward or 0.0

    def add_text(self, text: str, answer: Answer) -> None:
        """Adds the text of the latest turn as a message, with the calls of tools that the environment read in it."""
        self.last_turn = text
        if answer.calls:
            message = {"role": "assistant", "content": answer.text, "tool_calls": list(answer.calls)}
        else:
            message = {"role": "assistant", "content": text}
        self.history.messages.append(message)

    def add_reply(self, reply: Reply) -> None:
        """Adds what follows the latest turn."""
        self.history.add_reply(reply)
        self.limits = reply.limits

    def conversation(self) -> Conversation:
        """Returns the conversation, which is over."""
        final = dict(next((answer.final for answer in self.answers if answer.final is not None), {}))
        notes = {name: value for answer in self.answers for name, value in answer.notes.items()}
        has_own_prompt = self.first.begins_context and not self.first.lost
        return Conversation(
            turn_rewards=tuple(self.turn_rewards),
            turn_ends=tuple(self.history.turn_ends),
            end_score=float(final.pop("score", 0.0)),
            extra={**notes, **final},
            messages=tuple(self.history.messages),
            is_truncated=self.is_truncated,
            tool_error=next((answer.tool_error for answer in self.answers if answer.tool_error), ""),
            agent_error=next((answer.agent_error for answer in self.answers if answer.agent_error), ""),
            last_turn=self.last_turn,
            lost=next((answer.lost for answer in self.answers if answer.lost), ""),
            beginning=self.about.observation,
            own_prompt=tuple(as_messages(self.about.prompt)) if has_own_prompt else (),
            last_beginning=self.history.last_beginning,
            num_returned=self.history.num_returned,
            ended_by="length" if self.is_truncated else self.ended_by,
            is_rewarded=any(answer.reward is not None or answer.final is not None for answer in self.answers),
            privileged=self.first.privileged,
            **{name: sum(getattr(answer, name) for answer in self.answers) for name in _COUNTS},
        )


class Talk:
    """The conversations of B responses, one environment each; an async context manager that begins and ends them.

    On entering, the texts by which the environments begin are added to the prompts (`prompts_B`); a context by which
    one begins replaces its prompt.
    """

    def __init__(
        self,
        environments: Environments,
        prompts_B: PromptBatch,
        seeds_B: NDArray[np.int64],
        record: RecordedStep | None,
        privileged: PrivilegedPrompts | None = None,
    ) -> None:
        self.prompts_B = prompts_B
        self._environments = environments
        self._seeds_B = seeds_B
        self._record = record
        self._privileged = privileged
        self._begun: dict[int, tuple[Episode, Answer]] = {}  # by place, and not yet in a conversation
        self._beginnings: list[Answer] = []  # by which the environments have begun
        self._refused: Sequence[str] = ()  # for each place: why its beginning cannot be a prompt; "": it can
        self._times = _TimesOfWork()

    @classmethod
    def about(
        cls,
        environments: Environments | None,
        prompts_B: PromptBatch,
        run_seed: int,
        step: int,
        names: Sequence[str] = (),
        privileged: PrivilegedPrompts | None = None,
    ) -> Self | None:
        """Makes the conversations of responses, one for each prompt here; None if there are no environments.

        All samples of a prompt have environments of the same seed, so that they begin in the same state. `names` are
        those of the responses in the record of the step; without names nothing is written. With `privileged`, a
        conversation of which the critic could not be told what it alone reads is lost.
        """
        if environments is None:
            return None
        seeds_B = response_seeds(run_seed, step, prompts_B.row_indices, 0) >> (63 - _SEED_BITS)
        record = None if environments.record is None else environments.record.at_step(step, names)
        return cls(environments, prompts_B, seeds_B, record, privileged)

    async def __aenter__(self) -> Self:
        """Starts the environment of every response."""

        async def begin(place: int) -> Answer:
            self._begun[place] = await self._begin(place)
            return self._begun[place][1]

        try:
            self._beginnings = await gather_calls(*map(begin, range(len(self._seeds_B))))
            await asyncio.to_thread(self._add_beginnings)  # as contexts may be long
        except BaseException:
            await self.__aexit__()
            raise
        return self

    def _add_beginnings(self) -> None:
        """Makes the prompts with what the environments have said first, and notes which conversations cannot be held.

        These are also those whose privileged text cannot be made of what their environment has named.
        """
        self.prompts_B, refused = self._environments.with_beginnings(self.prompts_B, self._beginnings)
        self._refused = [
            why or self._why_not_privileged(row, answer)
            for why, row, answer in zip(refused, self.prompts_B.rows, self._beginnings, strict=True)
        ]

    def _why_not_privileged(self, row: PromptRow, beginning: Answer) -> str:
        """Returns why a row has no privileged text; "" if it has one, or its conversation is lost anyway."""
        if self._privileged is None or beginning.lost:
            return ""
        try:
            self._privileged.tokens(row, beginning.privileged)
        except ValueError as error:
            return f"{row.place}: critic.privileged_prompt: {error}"
        return ""

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
        said = self._nothing_said(place, first)
        try:
            while True:
                turn = await turns.next_of(row)
                said.add_turn(turn.tokens)
                reply = Reply() if first.is_over else await self._reply_to(turn, episode, said)
                if not turn.is_last:
                    await turns.reply(turn, reply)
                if not len(reply.tokens):
                    return said.conversation()
                said.add_reply(reply)
        finally:
            episode.abandon()

    def _nothing_said(self, place: int, first: Answer) -> _Said:
        """Returns a conversation in which the environment has begun."""
        row = self.prompts_B.rows[place]
        is_templated = self._environments.tokenizer.chat_template.applies_to(row.prompt)
        prompt = self.prompts_B.prompts.between(place, place + 1).values.tolist()
        history = History.of(prompt, as_messages(row.begun_prompt), is_templated=is_templated)
        return _Said(row, first, history, first.limits)

    async def _reply_to(self, turn: Turn, episode: Episode, said: _Said) -> Reply:
        """Decodes a turn and tells it to the environment; returns its answer as tokens.

        There are none if the environment has ended the conversation, or if the policy may say no more. Then the
        environment is told so, and answers for the last time.
        """
        text, has_stopped = self._text_of(turn, said.limits)
        answer = await self._times.note(self._say(turn, text, has_stopped, episode, said))
        said.add_answer(answer)
        said.add_text(text, answer)
        said.is_truncated = turn.is_last and not has_stopped
        reply = Reply()
        if not answer.is_over and turn.turn < self._environments.config.rollout.multi_turn.max_turns:
            reply = await self._reply_that_fits(answer, turn, episode, said)
        if said.answers[-1].is_over:
            said.ended_by = "environment"
        elif not len(reply.tokens):
            said.add_answer(await self._times.note(episode.end()))
        return reply

    async def _reply_that_fits(self, answer: Answer, turn: Turn, episode: Episode, said: _Said) -> Reply:
        """Returns an answer as tokens, or the one that takes its place because it does not fit into the context.

        There are no tokens if none of them can be said. If one answer after the other does not fit, the conversation
        ends as truncated.
        """
        for _ in range(_MAX_REFUSED):
            reply = await self._tokens_of(answer, turn, said)
            if isinstance(reply, Reply):
                return reply
            answer = await self._times.note(episode.refuse(reply))
            said.add_answer(answer)
            if answer.is_over:
                said.is_truncated = True
                return Reply()
        _say_once_that_nothing_fits(_MAX_REFUSED)
        said.is_truncated = True
        return Reply()

    def _text_of(self, turn: Turn, limits: TurnLimits) -> tuple[str, bool]:
        """Returns the text of a turn, and whether it ended by itself, and not at a limit of its length."""
        environments = self._environments
        text = environments.tokenizer.decode(turn.tokens)
        return text, environments.has_stopped(text, turn.tokens[-1], limits.stop)

    def _say(self, turn: Turn, text: str, has_stopped: bool, episode: Episode, said: _Said) -> Awaitable[Answer]:
        """Tells the environment a turn, with what it may know of its tokens."""
        room = self._room(said)
        ended_by: EndedBy = "length"
        if has_stopped:
            ended_by = "stop"
        elif room.response > 0 and room.context == 0:
            ended_by = "context"
        log_probs: Sequence[tuple[str, float]] = ()
        if said.limits.with_log_probs:
            pieces = self._environments.tokenizer.pieces(turn.tokens)
            log_probs = tuple(zip(pieces, turn.log_probs, strict=False))  # a group that has none sends none
        return episode.say(
            text,
            ended_by,
            room=room,
            num_context_tokens=said.history.context_length - len(turn.tokens),
            num_tokens=len(turn.tokens),
            log_probs=log_probs,
        )

    def _room(self, said: _Said, num_context_tokens: int | None = None) -> Room:
        """Returns the tokens that are left in the response, and in its context or in another with so many tokens."""
        environments = self._environments
        used = said.history.context_length if num_context_tokens is None else num_context_tokens
        return Room(
            context=max(0, environments.max_context_length - used),
            response=environments.config.data.max_response_length - len(said.history.tokens),
        )

    async def _tokens_of(self, answer: Answer, turn: Turn, said: _Said) -> Reply | NoRoom:
        """Returns an answer as tokens, or NoRoom if they and one token more do not fit into the context.

        There are no tokens if the response has no room for them, which cuts the conversation off, or if they cannot be
        said to the model, which is a failure of the environment.
        """
        if turn.is_last:
            said.is_truncated = True
            return Reply()
        try:
            reply = await self._rendered(answer, turn, said)
        except ValueError as error:  # e.g. two messages of the user that a coroutine said together
            lost = f"what followed turn {turn.turn} cannot be said to the model: {error}"
            said.add_answer(Answer(lost=lost))
            return Reply()
        room = self._room(said, len(reply.tokens) - reply.num_said if reply.begins_context else None)
        if len(reply.tokens) >= room.response:
            said.is_truncated = True
            return Reply()
        if reply.num_said >= room.context:
            return NoRoom(room, reply.num_said)
        return reply

    async def _rendered(self, answer: Answer, turn: Turn, said: _Said) -> Reply:
        """Returns an answer as the tokens that follow a turn, or of the context that it begins.

        Raises:
            ValueError: the chat template cannot write it.
        """
        if not answer.begins_context:
            return self._following(answer, turn, said.history)
        environments = self._environments
        # In a thread, as a context may be long.
        context = await asyncio.to_thread(environments.context, said.about.data_source, answer)
        return Reply(
            tokens=context.tokens.tolist(),
            messages=answer.messages,
            num_said=len(context.tokens),
            begins_context=True,
            is_templated=environments.tokenizer.chat_template.template is not None,
            limits=answer.limits,
        )

    def _following(self, answer: Answer, turn: Turn, history: History) -> Reply:
        """Returns an answer as the tokens that follow the latest turn, or an earlier one in a context of its own."""
        after = answer.after_turn or turn.turn
        is_templated = history.is_templated(after)
        following = self._environments.turn_tokens.reply(
            answer.messages, last_token=history.last_token_of(after), is_templated=is_templated
        ).tolist()
        if not following:  # without a template an empty text has no tokens
            return Reply()
        reply = Reply(following, answer.messages, len(following), is_templated=is_templated, limits=answer.limits)
        if after == turn.turn:
            return reply
        return replace(
            reply,
            tokens=[*history.tokens_up_to(after), *following],
            messages=(*history.messages_up_to(after), *answer.messages),
            begins_context=True,
            after_turn=after,
        )

    async def _take_begun(self, place: int) -> tuple[Episode, Answer]:
        """Returns the environment of a response, and how it began; begins it anew after the loss of a group."""
        episode, answer = self._begun.pop(place) if place in self._begun else await self._begin(place)
        if what_was_said(answer) != what_was_said(self._beginnings[place]):  # the prompt is that of the first attempt
            where = self.prompts_B.rows[place].place
            return episode, Answer(is_over=True, lost=f"{where}: the environment began otherwise than before")
        if refused := self._refused[place]:
            return episode, Answer(is_over=True, lost=refused)
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
        episode = self._environments.processes.begin(row.data_source, row.fields, seed, replay, prompt=row.prompt)
        try:
            answer = await self._times.note(episode.start())
        except BaseException:
            episode.abandon()
            raise
        return episode, answer

    def request(self, places: Sequence[int]) -> conversation_pb2.Conversation:
        """Returns the part of a Generate request that asks for the conversations at these places, in this order."""
        limits = [limits_message(self._beginnings[place].limits) for place in places]
        request = self._environments.request
        request.first_turns.extend(
            conversation_pb2.FirstTurn(place=row, limits=own) for row, own in enumerate(limits) if own is not None
        )
        return request

    def spans(self, step: int) -> list[Span]:
        """Returns the times in which at least one environment was asked, as spans of the timeline."""
        return [Span("environments", "environment", step, start, end) for start, end in self._times.times_s]


@cache
def _say_once_that_nothing_fits(num_answers: int) -> None:
    log.warning(
        "after a turn, %d answers of its environment did not fit into the context (environment/num_truncated)",
        num_answers,
    )


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
