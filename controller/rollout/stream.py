"""Rollouts of one batch of prompts, in parts that are handed on while others are still generated."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray

from controller.data.prompts import Answered, PromptBatch
from controller.ppo.masked_stats import Float32s
from controller.rollout.results import ScoredResponses
from controller.workers.actor_client import ActorClient
from controller.workers.command import CommandReply
from controller.workers.concurrency import gather_calls
from splitppo.batch import Array, Batch, Column, concatenate, row_order
from splitppo.config import Config, DataConfig, RolloutConfig
from splitppo.config.evaluation import EvaluationConfig
from splitppo.v1.actor_pb2 import SamplingParams
from splitppo.v1.batch_pb2 import SLOT_KIND_CANDIDATES, SLOT_KIND_EXPERIENCE, SLOT_KIND_GREEDY, Slot


def sampling_params(section: RolloutConfig | EvaluationConfig, data: DataConfig) -> SamplingParams:
    """How responses are drawn, as Generate is told."""
    drawn = section.model_dump(include={"temperature", "top_p", "top_k"})
    return SamplingParams(**drawn, max_response_length=data.max_response_length)


@dataclass(frozen=True, eq=False)
class StreamPart:
    """Responses that have ended one after another, and are handed on together.

    Attributes:
        slot: where the workers keep its rows: a part of the batch's slot, or all of it if there is no other part.
        places: [num_rows] ascending, which rows of the batch they are; those are ordered by prompt, then sample.
        prompts: one for each row.
        rollouts: prompts and responses; with `places` where there are other parts.
    """

    slot: Slot
    places: Array
    prompts: PromptBatch
    rollouts: Batch


class Rollouts(Protocol):
    """The responses to a batch of prompts, for whoever computes with them: they are coming, or already there.

    Attributes:
        slot: where the workers keep them.
        prompts: one for all samples of it.
        num_draws: how many batches of prompts were drawn for them.
        scored: their scores before any penalty, where they are known.
        places: of each part, once `generate` is done: which rows of the batch it holds.
    """

    slot: Slot
    prompts: PromptBatch
    num_draws: int
    scored: ScoredResponses | None

    @property
    def places(self) -> Sequence[Array]: ...

    @property
    def order(self) -> NDArray[np.int64]:
        """Where the rows of the batch, in their order, are found in its parts one after the other."""

    async def generate(self, *, on_generated: Callable[[], None]) -> tuple[Batch, CommandReply | None]:
        """Prompts, responses and their seeds, ordered by prompt, then sample; no reply where nothing was sampled.

        `on_generated` is called once the actor has them all, while they are still on their way here.
        """

    def parts(self) -> AsyncIterator[StreamPart]:
        """The parts that have rows, one after the other, each as soon as it is here."""

    def in_order(self, parts: Iterable[Batch]) -> Batch:
        """What was computed of the parts that have rows, in the order of the prompts."""

    def answered(self, scores_B: Float32s) -> Sequence[Answered]:
        """Each batch of prompts that was drawn, with the scores of its responses; `scores_B` are those of the rows."""


class RolloutStream:
    """Generation of one batch of prompts, in parts; see `Rollouts`.

    Only what is computed row by row sees parts; `in_order` brings it back into the order of the prompts.
    """

    def __init__(
        self,
        actor: ActorClient,
        prompts: PromptBatch,
        slot: Slot,
        seeded: Batch,
        sampling: SamplingParams,
        *,
        num_parts: int = 1,
        columns: Sequence[str] = ("responses",),
    ) -> None:
        """`seeded` is what Generate reads of the prompts; `columns` are fetched of what it makes."""
        self._actor = actor
        self._seeded = seeded
        self._sampling = sampling
        self._columns = columns
        self._asked = prompts.repeated(int(seeded["seeds"].lengths[0]))
        self.prompts, self.num_draws = prompts, 1
        self.scored: ScoredResponses | None = None
        self.slot = slot
        self._slots = [slot]
        if num_parts > 1:
            self._slots = [Slot(kind=slot.kind, step=slot.step, part=part) for part in range(1, num_parts + 1)]
        self._ended = [asyncio.Event() for _ in self._slots]
        loop = asyncio.get_running_loop()
        self._fetched: list[asyncio.Future[StreamPart]] = [loop.create_future() for _ in self._slots]

    @classmethod
    def of_step(cls, config: Config, actor: ActorClient, prompts: PromptBatch, step: int) -> Self:
        """Responses to each prompt of a step, n of each, in `rollout.stream_groups` parts."""
        assert config.rollout.stream_groups != "auto", "the run folder resolves it"
        slot, sampling = Slot(kind=SLOT_KIND_EXPERIENCE, step=step), sampling_params(config.rollout, config.data)
        seeded = prompts.to_batch(config.run.seed, step, config.rollout.n)
        return cls(actor, prompts, slot, seeded, sampling, num_parts=config.rollout.stream_groups)

    @classmethod
    def of_candidates(
        cls,
        config: Config,
        actor: ActorClient,
        prompts: PromptBatch,
        step: int,
        *,
        generation: int,
        earlier: NDArray[np.int64],
    ) -> Self:
        """Responses to the prompts of a generation (from 1), n to each, of which a step keeps some.

        `earlier` are the row indices of the step's earlier generations: a prompt of them gets further seeds.
        """
        slot = Slot(kind=SLOT_KIND_CANDIDATES, step=step, part=generation)
        seeded = prompts.to_batch(config.run.seed, step, config.rollout.n, earlier=earlier)
        sampling = sampling_params(config.rollout, config.data)
        return cls(actor, prompts, slot, seeded, sampling, columns=("responses", "rollout_log_probs"))

    @classmethod
    def greedy(cls, config: Config, actor: ActorClient, prompts: PromptBatch, step: int) -> Self:
        """The most likely response to each prompt of a step, one token after the other."""
        slot, length = Slot(kind=SLOT_KIND_GREEDY, step=step), config.data.max_response_length
        sampling = SamplingParams(temperature=0.0, top_p=1.0, max_response_length=length)
        return cls(actor, prompts, slot, prompts.to_batch(config.run.seed, step, 1), sampling)

    async def generate(self, *, on_generated: Callable[[], None]) -> tuple[Batch, CommandReply]:
        """Prompts, the columns asked for and seeds, ordered by prompt, then sample; see `Rollouts`."""
        await self._actor.put_batch(self.slot, self._seeded)
        reply, *parts = await gather_calls(self._sample(on_generated), *map(self._fetch, range(len(self._slots))))
        rollouts = self.in_order(part.rollouts.select(("prompts", *self._columns)) for part in parts)
        seeds = Column(self._seeded["seeds"].values, np.ones(rollouts.num_rows, np.int32))
        return rollouts.merge(Batch(rollouts.num_rows, {"seeds": seeds})), reply

    async def parts(self) -> AsyncIterator[StreamPart]:
        """See `Rollouts`. Whoever is cancelled while it waits does not disturb the others."""
        for fetched in self._fetched:
            part = await asyncio.shield(fetched)
            if len(part.places):
                yield part

    @property
    def places(self) -> Sequence[Array]:
        return [fetched.result().places for fetched in self._fetched]

    @cached_property
    def order(self) -> NDArray[np.int64]:
        return row_order(np.concatenate(self.places))

    def in_order(self, parts: Iterable[Batch]) -> Batch:
        joined = concatenate(list(parts))
        return joined if len(self._slots) == 1 else joined.take(self.order)

    def answered(self, scores_B: Float32s) -> Sequence[Answered]:
        return [(self.prompts, scores_B)]

    async def _sample(self, on_generated: Callable[[], None]) -> CommandReply:
        reply = await self._actor.generate(
            self.slot,
            self._sampling,
            base_step=self.slot.step - 1,
            num_parts=len(self._slots),
            on_part=lambda part: self._ended[part - 1].set(),
        )
        for ended in self._ended:
            ended.set()
        on_generated()
        return reply

    async def _fetch(self, index: int) -> StreamPart:
        slot = self._slots[index]
        await self._ended[index].wait()
        if len(self._slots) > 1:
            fetched = await self._actor.get_batch(slot, [*self._columns, "places"])
            places = fetched["places"].values
        else:
            fetched = await self._actor.get_batch(slot, self._columns)
            places = np.arange(fetched.num_rows)
        prompts = self._asked.take(places)
        rollouts = Batch(fetched.num_rows, {"prompts": prompts.prompts}).merge(fetched)
        part = StreamPart(slot, places, prompts, rollouts)
        self._fetched[index].set_result(part)
        return part
