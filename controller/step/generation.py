"""Makes the actor sample responses in parts; finished parts can be scored while others are generated."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from functools import cached_property
from typing import Self

import numpy as np
from numpy.typing import NDArray

from controller.data.prompts import NO_ROWS, Answered, PromptBatch
from controller.ppo.masked_stats import Float32s
from controller.ppo.scores import Scores
from controller.step.context import StepContext
from controller.step.parts import RolloutPart, in_order
from controller.workers.actor_client import sampling_params
from controller.workers.command import CommandReply
from controller.workers.concurrency import gather_calls
from splitppo.batch import Batch, row_order
from splitppo.v1.actor_pb2 import SamplingParams
from splitppo.v1.batch_pb2 import SLOT_KIND_CANDIDATES, SLOT_KIND_EXPERIENCE, SLOT_KIND_GREEDY, Slot


class SampledRollouts:
    """The responses that the actor samples for a batch of prompts, in parts; a `PendingRollouts`.

    Only calls that compute row by row work on parts. `in_order` puts their results into the order of the prompts.
    """

    def __init__(
        self,
        step: StepContext,
        prompts: PromptBatch,
        slot: Slot,
        *,
        num_parts: int = 1,
        earlier: NDArray[np.int64] = NO_ROWS,
        columns: Sequence[str] = ("responses",),
        is_greedy: bool = False,
    ) -> None:
        """Prepares sampling; `earlier` is passed to `PromptBatch.to_batch`, `columns` are fetched from the actor."""
        self._actor, self._record, self._base_step = step.workers.actor, step.record, step.base_step
        sampling, num_samples = sampling_params(step.config.rollout, step.config.data), step.config.rollout.n
        if is_greedy:
            num_samples, limit = 1, sampling.max_response_length
            sampling = SamplingParams(temperature=0.0, top_p=1.0, max_response_length=limit)
        self._seeded = prompts.to_batch(step.config.run.seed, step.number, num_samples, earlier=earlier)
        self._asked = prompts.repeated(num_samples)
        self._sampling = sampling
        self._columns = columns
        self._timing = "gen_max" if is_greedy else "gen"
        self.slot, self.prompts = slot, prompts
        self.scores: Scores | None = None
        self.greedy_scores: Float32s | None = None
        self.on_actor = asyncio.Event()
        self._slots = [slot]
        if num_parts > 1:
            self._slots = [Slot(kind=slot.kind, step=slot.step, part=part) for part in range(1, num_parts + 1)]
        self._ended = [asyncio.Event() for _ in self._slots]
        loop = asyncio.get_running_loop()
        self._fetched: list[asyncio.Future[RolloutPart]] = [loop.create_future() for _ in self._slots]

    @classmethod
    def of_step(cls, step: StepContext, prompts: PromptBatch) -> Self:
        """Makes the rollouts of a step: `rollout.n` responses per prompt, in `rollout.stream_groups` parts."""
        num_parts = step.config.rollout.stream_groups
        assert num_parts != "auto", "load resolves it"
        return cls(step, prompts, Slot(kind=SLOT_KIND_EXPERIENCE, step=step.number), num_parts=num_parts)

    @classmethod
    def of_candidates(
        cls, step: StepContext, prompts: PromptBatch, *, generation: int, earlier: NDArray[np.int64]
    ) -> Self:
        """Makes the rollouts of round `generation` (from 1) of dynamic sampling; the step keeps some of the rollouts.

        `earlier` are the row indices of the step's earlier generations. A prompt that is among them gets other seeds.
        """
        slot = Slot(kind=SLOT_KIND_CANDIDATES, step=step.number, part=generation)
        return cls(step, prompts, slot, earlier=earlier, columns=("responses", "rollout_log_probs", "seeds"))

    @classmethod
    def greedy(cls, step: StepContext, prompts: PromptBatch) -> Self:
        """Makes the greedy rollouts of a step: one response per prompt, always with the most likely token."""
        return cls(step, prompts, Slot(kind=SLOT_KIND_GREEDY, step=step.number), is_greedy=True)

    async def generate(self) -> Batch:
        """Makes the actor sample the responses; returns prompts and columns, ordered by prompt, then sample."""
        with self._record.timed(self._timing):
            await self._actor.put_batch(self.slot, self._seeded)
            reply, *parts = await gather_calls(self._sample(), *map(self._fetch, range(len(self._slots))))
            rollouts = in_order([part.rollouts.select(("prompts", *self._columns)) for part in parts], self.order)
        places = [part.places.tolist() for part in parts]
        self._record.add_reply("actor", "gen", reply, parts=places if len(places) > 1 else ())
        return rollouts

    async def parts(self) -> AsyncIterator[RolloutPart]:
        """Yields each part of the responses that has rows as soon as it has arrived. Several callers may iterate."""
        for fetched in self._fetched:
            part = await asyncio.shield(fetched)
            if len(part.places):
                yield part

    @cached_property
    def order(self) -> NDArray[np.int64]:
        return row_order(np.concatenate([fetched.result().places for fetched in self._fetched]))

    def answered(self, scores_B: Float32s) -> Sequence[Answered]:
        return [(self.prompts, scores_B)]

    async def _sample(self) -> CommandReply:
        reply = await self._actor.generate(
            self.slot,
            self._sampling,
            base_step=self._base_step,
            num_parts=len(self._slots),
            on_part=lambda part: self._ended[part - 1].set(),
        )
        for ended in (*self._ended, self.on_actor):
            ended.set()
        return reply

    async def _fetch(self, index: int) -> RolloutPart:
        slot = self._slots[index]
        await self._ended[index].wait()
        is_streamed = len(self._slots) > 1
        fetched = await self._actor.get_batch(slot, [*self._columns, "places"] if is_streamed else self._columns)
        places = fetched["places"].values if is_streamed else np.arange(fetched.num_rows)
        prompts = self._asked.take(places)
        rollouts = Batch(fetched.num_rows, {"prompts": prompts.prompts}).merge(fetched)
        part = RolloutPart(slot, places, prompts, rollouts)
        self._fetched[index].set_result(part)
        return part
