"""Drives the conversations of a batch: from the end of a turn, by the environment's answer, to the reply's tokens.

    sampling group                     controller                       environment process
    a turn ends     -- Turn ------->   decode the turn's tokens
                                       Episode.say  -- text -------->   converse(chat, row)
                                                    <- messages -----   ... await chat.turn(...)
    the row goes on <- TurnReply ---   tokens of the messages

Every row has a task of its own. Replies that are there at the same time are sent together.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from controller.conversations.conversation import Conversation
from controller.conversations.environments import Environments
from controller.data.prompts import PromptBatch, response_seeds
from controller.sampling.stream import Replies, Share
from controller.workers.concurrency import gather_calls
from environments.messages import Answer
from environments.pool import Episode
from environments.record import StepRecord
from splitppo.batch import Batch, Column
from splitppo.clock import unix_s
from splitppo.rpc.errors import WrongState
from splitppo.run_folder.spans import Span
from splitppo.v1 import conversation_pb2

# Environments get seeds that every random number generator takes.
_SEED_BITS = 31
# Shorter pauses between two times in which environments work are no pause in the timeline.
_PAUSE_S = 0.01


class OneTurn:
    """Responses of one turn, in the place of `Conversations`: nobody answers them.

    Attributes:
        asked: the prompt of each response.
        columns: the columns of rollouts that responses have beside those of every response.
        converse: makes what answers the turns of the responses that one group samples; None: nothing does.
    """

    columns: Sequence[str] = ()
    converse: Callable[[Share], Replies] | None = None

    def __init__(self, asked: PromptBatch) -> None:
        self.asked = asked

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    def spans(self, step: int) -> list[Span]:  # noqa: ARG002 - of Conversations
        """Returns the times in which at least one environment was asked, as spans of the timeline."""
        return []

    def at(self, places: Sequence[int]) -> list[Conversation]:  # noqa: ARG002 - of Conversations
        """Returns the conversations at these places, which are over; empty if every response has one turn."""
        return []


class Conversations(OneTurn):
    """The conversations of B responses, one environment each; an async context manager that begins and ends them.

    On entering, the texts by which the environments begin are added to the prompts (`asked`).
    """

    columns = ("response_mask",)

    def __init__(
        self, environments: Environments, asked: PromptBatch, seeds_B: NDArray[np.int64], record: StepRecord | None
    ) -> None:
        super().__init__(asked)
        self.environments = environments
        self.converse = partial(OpenConversations, self)
        self._record = record
        self._asked_s: list[tuple[float, float]] = []  # when at least one environment was asked, in unix seconds
        self._seeds_B = seeds_B
        self._episodes: dict[int, tuple[Episode, Answer]] = {}  # begun, and not yet in a conversation
        self._finished: list[asyncio.Future[Conversation]] = []
        self._num_asked = 0
        self._texts: list[str] = []  # by which the environments have begun

    async def __aenter__(self) -> Self:
        """Starts the environment of every response."""
        loop = asyncio.get_running_loop()
        self._finished = [loop.create_future() for _ in self._seeds_B]

        async def begin(place: int) -> str:
            self._episodes[place] = _, answer = await self.begin(place)
            return _text_of(answer)

        try:
            self._texts = await gather_calls(*map(begin, range(len(self._seeds_B))))
            self.asked = self.environments.with_beginnings(self.asked, self._texts)
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *errors: object) -> None:
        """Ends environments with which nobody talked; waits until the record is on disk, before anybody learns."""
        for episode, _answer in self._episodes.values():
            episode.abandon()
        self._episodes.clear()
        if self._record is not None and errors == (None, None, None):
            await asyncio.to_thread(self._record.sync)

    async def begin(self, place: int) -> tuple[Episode, Answer]:
        """Returns the environment of a response, and its first answer; starts it unless it has begun."""
        if place in self._episodes:
            return self._episodes.pop(place)
        row = self.asked.rows[place]
        seed = int(self._seeds_B[place])
        replay = None
        if self._record is not None:
            environment = self.environments.config.rollout.multi_turn.environment_of(row.data_source)
            replay = self._record.replay(place, [str(environment), row.prompt, row.fields, seed])
        episode = self.environments.processes.begin(row.data_source, row.fields, seed, replay)
        try:
            answer = await self.ask(episode.start())
        except BaseException:
            episode.abandon()
            raise
        if self._texts and _text_of(answer) != self._texts[place]:  # the prompt has the text of the first attempt
            return episode, Answer(is_over=True, lost=f"{row.place}: the environment began otherwise than before")
        return episode, answer

    async def ask(self, answer: Any) -> Answer:
        """Awaits an environment's answer, and notes the time for the timeline."""
        started_s = unix_s()
        self._num_asked += 1
        if self._num_asked == 1 and (not self._asked_s or started_s - self._asked_s[-1][1] > _PAUSE_S):
            self._asked_s.append((started_s, started_s))
        try:
            result: Answer = await answer
            return result
        finally:
            self._num_asked -= 1
            self._asked_s[-1] = (self._asked_s[-1][0], unix_s())

    def spans(self, step: int) -> list[Span]:
        return [Span("environments", "environment", step, start, end) for start, end in self._asked_s]

    def begin_again(self, places: Iterable[int]) -> None:
        """Forgets the conversations at these places, whose responses are sampled again because a group was lost."""
        for place in places:
            self._finished[place] = asyncio.get_running_loop().create_future()

    def finish(self, place: int, conversation: Conversation) -> None:
        """Stores a conversation that is over. One whose response was fetched before a group was lost stays as it is."""
        if not self._finished[place].done():
            self._finished[place].set_result(conversation)

    async def finished(self, places: Sequence[int]) -> None:
        """Waits until the conversations at these places are over."""
        for place in places:
            await asyncio.shield(self._finished[place])

    def at(self, places: Sequence[int]) -> list[Conversation]:
        return [self._finished[place].result() for place in places]


def _text_of(answer: Answer) -> str:
    return "".join(message["content"] for message in answer.messages)


def conversations_of(
    environments: Environments | None, asked: PromptBatch, run_seed: int, step: int, names: Sequence[str] = ()
) -> OneTurn:
    """Makes the conversations of responses to these prompts, one for each response, if there are environments.

    All samples of a prompt have environments of the same seed, so that they begin in the same state. `names` are those
    of the responses in the record of the step; without names nothing is written.
    """
    if environments is None:
        return OneTurn(asked)
    seeds_B = response_seeds(run_seed, step, asked.row_indices, 0) >> (63 - _SEED_BITS)
    record = None if environments.record is None else environments.record.at_step(step, names)
    return Conversations(environments, asked, seeds_B, record)


class OpenConversations:
    """The conversations of the responses that one group samples, in one attempt; the `Replies` of a share."""

    def __init__(self, whole: Conversations, share: Share) -> None:
        self.request = whole.environments.request
        self._whole = whole
        self._client = share.client
        self._slot = share.slot
        self._places = share.places.tolist()
        prompts = whole.asked.prompts.take(share.places.astype(np.int64))
        seeds = share.seeded["seeds"].values
        one_each = np.ones(len(seeds), np.int32)
        whole.begin_again(share.places[~np.isin(share.places, np.concatenate([share.places[:0], *share.fetched]))])
        self.rows = Batch(len(seeds), {"prompts": prompts, "seeds": Column(seeds, one_each)})
        self._turns: list[asyncio.Queue[conversation_pb2.Turn]] = [asyncio.Queue() for _ in self._places]
        self._num_known = [0] * len(self._places)
        self._replies: list[conversation_pb2.TurnReply] = []
        self._news = asyncio.Event()
        self._all_said = False

    def on_turns(self, ended: conversation_pb2.TurnsEnded) -> None:
        """Takes turns that have ended; a turn that is told again is ignored."""
        for turn in ended.turns:
            if turn.turn == self._num_known[turn.place] + 1:
                self._num_known[turn.place] += 1
                self._turns[turn.place].put_nowait(turn)

    async def run(self) -> None:
        """Leads all conversations to their ends."""
        await gather_calls(self._converse(), self._send())

    async def finished(self, places: NDArray[np.int32]) -> None:
        await self._whole.finished(places.tolist())

    async def _converse(self) -> None:
        await gather_calls(*(self._converse_one(number) for number in range(len(self._places))))
        self._all_said = True
        self._news.set()

    async def _converse_one(self, number: int) -> None:
        place = self._places[number]
        whole = self._whole
        episode, first = await whole.begin(place)
        try:
            row = _Row(whole, place, episode, first, self._turns[number])
            while (reply := await row.reply()) is not None:
                self._replies.append(reply)
                self._news.set()
                if reply.is_last:
                    break
            whole.finish(place, row.conversation())
        finally:
            episode.abandon()

    async def _send(self) -> None:
        """Sends replies, all that are there together, until the last one is sent."""
        while not self._all_said or self._replies:
            await self._news.wait()
            self._news.clear()
            replies = self._replies
            self._replies = []
            try:
                if replies:
                    await self._client.reply(self._slot, replies)
            except WrongState:
                return  # Generate has ended, or was cancelled: its own reply says how


@dataclass(eq=False)
class _Row:
    """One conversation that is going on: its turns so far, and what the environment gave for them."""

    whole: Conversations
    place: int
    episode: Episode
    first: Answer
    turns: "asyncio.Queue[conversation_pb2.Turn]"
    length: int = 0  # tokens of the response so far
    ends: list[int] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    messages: list[Any] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    last_turn: str = ""
    is_truncated: bool = False
    ended_by: str = "turns"

    def __post_init__(self) -> None:
        self.answers.append(self.first)
        if self.first.is_over:
            self.ended_by = "environment"

    async def reply(self) -> conversation_pb2.TurnReply | None:
        """Waits for the next turn of the policy, and returns the reply to it; None if the turn takes no reply."""
        turn = await self.turns.get()
        self.length += len(turn.tokens)
        self.ends.append(self.length - 1)
        # What was given before turn 1 belongs to it.
        self.rewards.append((self.first.reward or 0.0) if turn.turn == 1 else 0.0)
        tokens = await self._answer_to(turn)
        if turn.is_last:
            return None
        self.length += len(tokens)
        return conversation_pb2.TurnReply(place=turn.place, turn=turn.turn, tokens=tokens, is_last=not len(tokens))

    async def _answer_to(self, turn: conversation_pb2.Turn) -> Sequence[int]:
        """Tells the environment a turn; returns the tokens that follow it, or none if the conversation is over."""
        if self.first.is_over:
            return ()
        environments = self.whole.environments
        last_token = turn.tokens[-1]
        text = environments.tokenizer.decode(turn.tokens)
        limits = environments.config.rollout.multi_turn
        has_stopped = environments.has_stopped(text, last_token)
        self.last_turn = text
        answer = await self.whole.ask(self.episode.say(text, "stop" if has_stopped else "length"))
        self._take(answer)
        self.is_truncated = turn.is_last and not has_stopped
        said: dict[str, Any] = {"role": "assistant", "content": answer.text if answer.calls else text}
        self.messages.append({**said, "tool_calls": list(answer.calls)} if answer.calls else said)
        if answer.is_over:
            self.ended_by = "environment"
            return ()
        may_go_on = not turn.is_last and turn.turn < limits.max_turns
        if may_go_on and len(tokens := self._tokens_of(answer, last_token)):
            return tokens
        self.is_truncated |= turn.is_last and turn.turn < limits.max_turns
        return self._take(await self.whole.ask(self.episode.end()))

    def _tokens_of(self, answer: Answer, last_token: int) -> Sequence[int]:
        """Returns the tokens of an answer's messages; none if they and one token more do not fit into the response."""
        environments = self.whole.environments
        prompt = self.whole.asked.rows[self.place].prompt
        is_templated = environments.tokenizer.chat_template.applies_to(prompt)
        try:
            reply = environments.turn_tokens.reply(answer.messages, last_token=last_token, is_templated=is_templated)
        except ValueError as error:  # e.g. two messages of the user that a coroutine said together
            return self._take(Answer(lost=f"what followed turn {len(self.ends)} cannot be said to the model: {error}"))
        if self.length + len(reply) >= environments.config.data.max_response_length:
            self.is_truncated = True
            return ()
        self.messages += answer.messages
        return [int(token) for token in reply]

    def _take(self, answer: Answer) -> tuple[()]:
        """Adds an answer to those of the conversation, its reward to the latest turn."""
        self.answers.append(answer)
        self.rewards[-1] += answer.reward or 0.0
        return ()

    def conversation(self) -> Conversation:
        """Returns the conversation, which is over."""
        final = dict(next((answer.final for answer in self.answers if answer.final is not None), {}))
        notes = {name: value for answer in self.answers for name, value in answer.notes.items()}
        counts = ("num_calls", "num_bad_calls", "num_tool_errors", "num_timeouts", "num_crashes")
        return Conversation(
            turn_rewards=tuple(self.rewards),
            turn_ends=tuple(self.ends),
            end_score=float(final.pop("score", 0.0)),
            extra={**notes, **final},
            messages=tuple(self.messages),
            is_truncated=self.is_truncated,
            tool_error=next((answer.tool_error for answer in self.answers if answer.tool_error), ""),
            last_turn=self.last_turn,
            lost=next((answer.lost for answer in self.answers if answer.lost), ""),
            beginning=self.whole.asked.rows[self.place].observation,
            ended_by="length" if self.is_truncated else self.ended_by,
            is_rewarded=any(answer.reward is not None or answer.final is not None for answer in self.answers),
            **{name: sum(getattr(answer, name) for answer in self.answers) for name in counts},
        )
