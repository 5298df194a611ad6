"""Fakes for conversations without processes: an actor that says scripted turns, and environments that are functions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from controller.workers.command import CommandReply
from environments.messages import Answer, NoRoom, Said
from environments.pool import EnvironmentProcesses, Episode
from environments.record import Replay
from splitppo.batch import Batch
from splitppo.rpc.errors import WrongState
from splitppo.v1.actor_pb2 import SamplingParams
from splitppo.v1.batch_pb2 import Slot
from splitppo.v1.conversation_pb2 import Conversation, Turn, TurnReply, TurnsEnded
from tests.support.call_log import CallLog
from tests.support.fake_rollout import FakeRollout
from tests.support.fake_services import FakeActor, FakeSampler, part_of

# (place, number of the turn, tokens of the response so far) -> tokens of the turn
Speak = Callable[[int, int, Sequence[int]], Sequence[int]]


class Talking(FakeSampler):
    """A client of a group that says the turns of a function, in the way of a real one: budget, mask, replies.

    Attributes:
        replies: all replies that were taken, in order.
        says_twice: every turn is told twice, as after a lost connection.
    """

    def __init__(self, log: CallLog) -> None:
        super().__init__(log)
        self.says_twice = False
        self.replies: list[TurnReply] = []
        self.conversations: list[Conversation] = []
        self._open: dict[int, asyncio.Queue[TurnReply]] | None = None

    def speak(self, place: int, turn: int, so_far: Sequence[int]) -> Sequence[int]:
        """Says one token; a test may set another function."""
        return [4]

    async def generate(
        self,
        slot: Slot,
        sampling: SamplingParams,
        *,
        base_step: int,
        num_parts: int = 1,
        sleep_after: bool = False,
        conversation: Conversation | None = None,
        on_part: Callable[[int], None] = lambda _: None,
        on_turns: Callable[[TurnsEnded], None] = lambda _: None,
        max_step_tokens: int = 0,
    ) -> CommandReply:
        assert not max_step_tokens
        assert conversation is not None
        self.conversations.append(conversation)
        self.sampling.append((slot, sampling))
        asked, limit = self._slot(slot), sampling.max_response_length
        num_rows = len(asked["seeds"].values)
        self._open = {place: asyncio.Queue() for place in range(num_rows)}

        async def converse(place: int) -> tuple[list[int], list[int], list[int]]:
            assert self._open is not None
            tokens, mask, segments = list[int](), list[int](), list[int]()
            for number in range(1, limit + 1):
                turn = list(self.speak(place, number, tokens))[: limit - len(tokens)]
                tokens, mask = tokens + turn, mask + [1] * len(turn)
                is_last = len(tokens) == limit
                log_probs = [-0.5] * len(turn) if conversation.with_log_probs else []
                ended = TurnsEnded(
                    turns=[Turn(place=place, turn=number, tokens=turn, is_last=is_last, log_probs=log_probs)]
                )
                for _ in range(1 + self.says_twice):
                    on_turns(ended)
                if is_last:
                    break
                reply = await self._open[place].get()
                assert reply.turn == number
                assert bool(reply.tokens) != reply.is_last
                assert not (reply.is_last and (reply.begins_context or reply.limits.ByteSize()))
                if reply.is_last:
                    break
                if reply.begins_context:
                    segments += len(tokens), len(reply.tokens)
                tokens, mask = tokens + list(reply.tokens), mask + [0] * len(reply.tokens)
                assert len(tokens) < limit
            return tokens, mask, segments

        rows = await asyncio.gather(*map(converse, range(num_rows)))
        self._open = None
        answers = Batch.from_rows(
            prompts=[
                prompt for prompt, own in zip(asked["prompts"].rows(), asked["seeds"].rows(), strict=True) for _ in own
            ],
            seeds=asked["seeds"].values[:, None],
            responses=[tokens for tokens, _, _ in rows],
            response_mask=[mask for _, mask, _ in rows],
            segments=[segments for *_, segments in rows],
            rollout_log_probs=[[-0.1 * is_sampled for is_sampled in mask] for _, mask, _ in rows],
        )
        by_length = np.argsort(answers["responses"].lengths, kind="stable")
        for part, places in enumerate(map(np.sort, self._parts_of(by_length, num_parts)), start=1):
            if num_parts > 1:
                part_rows = answers.take(places).merge(Batch.from_rows(places=places[:, None].tolist()))
                self._slots[part_of(slot, part).SerializeToString()] = part_rows
                on_part(part)

        def keep() -> None:
            self._slots[slot.SerializeToString()] = answers

        return await self._run("generate", slot.step, base_step, keep)

    async def reply(self, slot: Slot, replies: Sequence[TurnReply]) -> None:
        if self._open is None:
            raise WrongState("no conversation is open")
        for reply in replies:
            self.replies.append(reply)
            self._open[reply.place].put_nowait(reply)


class TalkingActor(Talking, FakeActor):
    """An actor that says the turns of a function."""


class TalkingRollout(Talking, FakeRollout):
    """A rollout group that says the turns of a function."""


# (row, seed) -> answers: first to the start, then to each turn, or answer that has no room, that is sent
Converse = Callable[[Mapping[str, Any], int], "Iterator[Answer]"]


class FunctionEpisode(Episode):
    """A conversation with a generator of answers; it is sent the texts of the policy, and None at the end.

    It asks the record first, like an `Episode`, but does not leave it: a recorded beginning is not told again.
    """

    def __init__(self, answers: Any, replay: Replay | None) -> None:  # not the episode's: there is no process
        self._answers = answers
        self._replay = replay
        self._told: list[Said | NoRoom | None] = []
        self._given: list[Answer] = []
        self.is_abandoned = False

    async def start(self) -> Answer:
        return self._answer(lambda: next(self._answers))

    async def say(self, text: str, ended_by: Any, **counted: Any) -> Answer:
        await asyncio.sleep(0)
        said = Said(text, ended_by, **counted)
        self._told.append(said)
        return self._answer(lambda: self._answers.send(said))

    async def refuse(self, no_room: NoRoom) -> Answer:
        self._told.append(no_room)
        return self._answer(lambda: self._answers.send(no_room))

    async def end(self) -> Answer:
        self._told.append(None)
        return self._answer(lambda: self._answers.send(None))

    def _answer(self, ask: Callable[[], Answer]) -> Answer:
        answer = None if self._replay is None else self._replay.find(self._told)
        if answer is not None:
            self._given.append(answer)
            return answer
        self._given.append(ask())
        if self._replay is not None:
            self._replay.add(self._given)
        return self._given[-1]

    def abandon(self) -> None:
        self.is_abandoned = True


class FunctionEnvironments(EnvironmentProcesses):
    """Environments that are generator functions in this process. `begun` has (data source, row, seed) of each."""

    def __init__(self, converse: Converse) -> None:  # not the pool's: there are no processes
        self._converse = converse
        self.begun: list[tuple[str, Mapping[str, Any], int]] = []
        self.episodes: list[FunctionEpisode] = []

    def schemas_of(self, data_source: str) -> Sequence[Mapping[str, Any]]:
        return ()

    def begin(
        self,
        data_source: str,
        row: Mapping[str, Any],
        seed: int,
        replay: Replay | None = None,
        *,
        prompt: object = None,
    ) -> FunctionEpisode:
        self.begun.append((data_source, row, seed))
        self.episodes.append(FunctionEpisode(self._converse(row, seed), replay))
        return self.episodes[-1]
