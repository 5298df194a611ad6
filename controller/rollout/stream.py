"""The rollouts of a step, in parts that are handed on while others are still generated."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from controller.data.prompts import PromptBatch
from controller.workers.actor_client import ActorClient
from controller.workers.command import CommandReply
from controller.workers.concurrency import gather_calls
from splitppo.batch import Array, Batch, Column, concatenate, row_order
from splitppo.config import Config, DataConfig, RolloutConfig
from splitppo.config.evaluation import EvaluationConfig
from splitppo.v1.actor_pb2 import SamplingParams
from splitppo.v1.batch_pb2 import SLOT_KIND_EXPERIENCE, Slot


def sampling_params(section: RolloutConfig | EvaluationConfig, data: DataConfig) -> SamplingParams:
    """How responses are drawn, as Generate is told."""
    drawn = section.model_dump(include={"temperature", "top_p", "top_k"})
    return SamplingParams(**drawn, max_response_length=data.max_response_length)


@dataclass(frozen=True, eq=False)
class StreamPart:
    """Responses of a step that have ended one after another, and are handed on together.

    Attributes:
        slot: where the workers keep its rows: a part of the step's slot, or all of it if there is no other part.
        places: [num_rows] ascending, which rows of the step they are; those are ordered by prompt, then sample.
        prompts: one for each row.
        rollouts: prompts and responses; with `places` where the step has other parts.
    """

    slot: Slot
    places: Array
    prompts: PromptBatch
    rollouts: Batch


class RolloutStream:
    """Generation of one step, in `rollout.stream_groups` parts.

    Only what is computed row by row sees parts; `in_order` brings it back into the order of the prompts.
    """

    def __init__(self, config: Config, actor: ActorClient, prompts: PromptBatch, step: int) -> None:
        self._config = config
        self._actor = actor
        self._prompts = prompts
        self._asked = prompts.repeated(config.rollout.n)
        self.slot = Slot(kind=SLOT_KIND_EXPERIENCE, step=step)
        self._slots = [self.slot]
        assert config.rollout.stream_groups != "auto", "the run folder resolves it"
        if config.rollout.stream_groups > 1:
            numbers = range(1, config.rollout.stream_groups + 1)
            self._slots = [Slot(kind=SLOT_KIND_EXPERIENCE, step=step, part=part) for part in numbers]
        self._ended = [asyncio.Event() for _ in self._slots]
        loop = asyncio.get_running_loop()
        self._fetched: list[asyncio.Future[StreamPart]] = [loop.create_future() for _ in self._slots]

    async def generate(self, *, on_generated: Callable[[], None]) -> tuple[Batch, CommandReply]:
        """Samples n responses per prompt; returns prompts, responses and their seeds, ordered by prompt, then sample.

        `on_generated` is called once the actor has them all, while they are still on their way here.
        """
        rows = self._prompts.to_batch(self._config.run.seed, self.slot.step, self._config.rollout.n)
        await self._actor.put_batch(self.slot, rows)
        reply, *parts = await gather_calls(self._sample(on_generated), *map(self._fetch, range(len(self._slots))))
        rollouts = self.in_order(part.rollouts.select(("prompts", "responses")) for part in parts)
        seeds = Column(rows["seeds"].values, np.ones(rollouts.num_rows, np.int32))
        return rollouts.merge(Batch(rollouts.num_rows, {"seeds": seeds})), reply

    async def parts(self) -> AsyncIterator[StreamPart]:
        """The parts that have rows, one after the other, each as soon as it is here.

        Whoever is cancelled while it waits does not disturb the others.
        """
        for fetched in self._fetched:
            part = await asyncio.shield(fetched)
            if len(part.places):
                yield part

    @property
    def places(self) -> Sequence[Array]:
        """Of each part, once all have been fetched: which rows of the step it holds."""
        return [fetched.result().places for fetched in self._fetched]

    @cached_property
    def order(self) -> NDArray[np.int64]:
        """Where the rows of the step, in their order, are found in its parts one after the other."""
        return row_order(np.concatenate(self.places))

    def in_order(self, parts: Iterable[Batch]) -> Batch:
        """What was computed of the parts that have rows, in the order of the prompts."""
        joined = concatenate(list(parts))
        return joined if len(self._slots) == 1 else joined.take(self.order)

    async def _sample(self, on_generated: Callable[[], None]) -> CommandReply:
        reply = await self._actor.generate(
            self.slot,
            sampling_params(self._config.rollout, self._config.data),
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
        if slot.part:
            responses = await self._actor.get_batch(slot, ["responses", "places"])
            places = responses["places"].values
        else:
            responses = await self._actor.get_batch(slot, ["responses"])
            places = np.arange(responses.num_rows)
        prompts = self._asked.take(places)
        rollouts = Batch(responses.num_rows, {"prompts": prompts.prompts}).merge(responses)
        part = StreamPart(slot, places, prompts, rollouts)
        self._fetched[index].set_result(part)
        return part
