"""The rollouts of a step: its prompts in groups, each of which is handed on as soon as its last response has ended."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from controller.data.prompts import PromptBatch
from controller.workers.actor_client import ActorClient
from controller.workers.command import CommandReply
from controller.workers.concurrency import gather_calls
from splitppo.batch import Batch, concatenate
from splitppo.config import Config, DataConfig, RolloutConfig
from splitppo.config.evaluation import EvaluationConfig
from splitppo.v1.actor_pb2 import SamplingParams
from splitppo.v1.batch_pb2 import SLOT_KIND_EXPERIENCE, Slot


def sampling_params(section: RolloutConfig | EvaluationConfig, data: DataConfig) -> SamplingParams:
    """How responses are drawn, as Generate is told."""
    drawn = section.model_dump(include={"temperature", "top_p", "top_k"})
    return SamplingParams(**drawn, max_response_length=data.max_response_length)


@dataclass(eq=False)
class StreamGroup:
    """Neighbouring prompts of a step, and their responses, which may come while others are still generated.

    Attributes:
        slot: where the workers keep its rows: a part of the step's slot, or all of it if this is the only group.
        ended: set when the last response has ended, so that the rows can be fetched.
        fetched: prompts and responses, ordered by prompt, then sample.
    """

    slot: Slot
    prompts: PromptBatch
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    fetched: asyncio.Future[Batch] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    async def rollouts(self) -> Batch:
        """What is fetched, as soon as it is here; a waiter that is cancelled does not disturb the others."""
        return await asyncio.shield(self.fetched)


class RolloutStream:
    """Generation of one step, its prompts in `rollout.stream_groups` groups as equal as possible."""

    def __init__(self, config: Config, actor: ActorClient, prompts: PromptBatch, step: int) -> None:
        self._config = config
        self._actor = actor
        self._prompts = prompts
        self.slot = Slot(kind=SLOT_KIND_EXPERIENCE, step=step)
        self.groups = [StreamGroup(self.slot, prompts)]
        if config.rollout.stream_groups > 1:
            places = np.array_split(np.arange(prompts.num_prompts), config.rollout.stream_groups)
            self.groups = [
                StreamGroup(Slot(kind=SLOT_KIND_EXPERIENCE, step=step, part=part), prompts.take(of_part))
                for part, of_part in enumerate(places, start=1)
            ]

    async def generate(self, *, on_generated: Callable[[], None]) -> tuple[Batch, CommandReply]:
        """Samples n responses per prompt; returns prompts and responses, ordered by prompt, then sample.

        `on_generated` is called once the actor has them all, while they are still on their way here.
        """
        rows = self._prompts.to_batch(self._config.run.seed, self.slot.step, self._config.rollout.n)
        await self._actor.put_batch(self.slot, rows)
        reply, *rollouts = await gather_calls(
            self._sample(on_generated), *(self._fetch(group) for group in self.groups)
        )
        return concatenate(rollouts), reply

    async def _sample(self, on_generated: Callable[[], None]) -> CommandReply:
        reply = await self._actor.generate(
            self.slot,
            sampling_params(self._config.rollout, self._config.data),
            base_step=self.slot.step - 1,
            num_parts=len(self.groups),
            on_part=lambda part: self.groups[part - 1].ended.set(),
        )
        for group in self.groups:
            group.ended.set()
        on_generated()
        return reply

    async def _fetch(self, group: StreamGroup) -> Batch:
        await group.ended.wait()
        responses = await self._actor.get_batch(group.slot, ["responses"])
        rollouts = group.prompts.repeated(self._config.rollout.n).merge(responses)
        group.fetched.set_result(rollouts)
        return rollouts
