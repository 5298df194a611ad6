"""Has responses sampled in parts; finished parts can be scored while others are generated."""

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
from controller.workers.command import CommandReply
from controller.workers.concurrency import gather_calls
from controller.workers.sampler_client import sampling_params
from splitppo.batch import Batch, concatenate, row_order
from splitppo.v1.actor_pb2 import SamplingParams
from splitppo.v1.batch_pb2 import SLOT_KIND_CANDIDATES, SLOT_KIND_EXPERIENCE, SLOT_KIND_GREEDY, Slot

_ALL_COLUMNS = ("responses", "rollout_log_probs", "seeds")


class SampledRollouts:
    """The responses that are sampled for a batch of prompts, in parts; a `PendingRollouts`.

    Only calls that compute row by row work on parts. `in_order` puts their results into the order of the prompts.
    If a rollout group is lost while it samples, the same responses are sampled again. Parts that were fetched before
    stay as they are, because other groups may have computed with them.
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
        """Prepares sampling; `earlier` is passed to `PromptBatch.to_batch`, `columns` are fetched from the sampler."""
        self._actor, self._sampler = step.workers.actor, step.workers.sampler
        self._record, self._base_step = step.record, step.base_step
        self._for_actor = slot.kind == SLOT_KIND_EXPERIENCE and self._sampler.rollout is not None
        sampling, num_samples = sampling_params(step.config.rollout, step.config.data), step.config.rollout.n
        if is_greedy:
            num_samples, limit = 1, sampling.max_response_length
            sampling = SamplingParams(temperature=0.0, top_p=1.0, max_response_length=limit)
        self._seeded = prompts.to_batch(step.config.run.seed, step.number, num_samples, earlier=earlier)
        self._asked = prompts.repeated(num_samples)
        self._sampling = sampling
        self._columns = _ALL_COLUMNS if self._for_actor else columns
        self._timing = "gen_max" if is_greedy else "gen"
        self.slot, self.prompts = slot, prompts
        self.scores: Scores | None = None
        self.greedy_scores: Float32s | None = None
        self.on_actor = asyncio.Event()
        self._slots = [slot]
        if num_parts > 1:
            self._slots = [Slot(kind=slot.kind, step=slot.step, part=part) for part in range(1, num_parts + 1)]
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
        return cls(step, prompts, slot, earlier=earlier, columns=_ALL_COLUMNS)

    @classmethod
    def greedy(cls, step: StepContext, prompts: PromptBatch) -> Self:
        """Makes the greedy rollouts of a step: one response per prompt, always with the most likely token."""
        return cls(step, prompts, Slot(kind=SLOT_KIND_GREEDY, step=step.number), is_greedy=True)

    async def generate(self) -> Batch:
        """Has the responses sampled; returns prompts and columns, ordered by prompt, then sample."""
        with self._record.timed(self._timing):
            reply = await self._sampler.sample(self._base_step, self._record.add_reply, self._attempt)
            parts = [fetched.result() for fetched in self._fetched]
            rollouts = in_order([part.rollouts.select(("prompts", *self._columns)) for part in parts], self.order)
            if self._for_actor:
                await self._actor.put_batch(self.slot, rollouts)
                rollouts = rollouts.select(("prompts", "responses"))
        self.on_actor.set()
        places = [part.places.tolist() for part in parts]
        self._record.add_reply(self._sampler.client.role, "gen", reply, parts=places if len(places) > 1 else ())
        return rollouts

    async def parts(self) -> AsyncIterator[RolloutPart]:
        """Yields each part of the responses that has rows as soon as it has arrived. Several callers may iterate."""
        for fetched in self._fetched:
            part = await asyncio.shield(fetched)
            if len(part.places):
                yield part

    @cached_property
    def order(self) -> NDArray[np.int64]:
        return row_order(self._places())

    def _places(self) -> NDArray[np.int64]:
        """Returns the indices of all rows that were fetched, in the order of the parts."""
        return np.concatenate([NO_ROWS, *(part.result().places for part in self._fetched if part.done())])

    def answered(self, scores_B: Float32s) -> Sequence[Answered]:
        return [(self.prompts, scores_B)]

    async def _attempt(self) -> CommandReply:
        """Samples and fetches all responses; in a repeated attempt, fetches those that were not fetched before."""
        await self._sampler.client.put_batch(self.slot, self._seeded)
        ended = [asyncio.Event() for _ in self._slots]
        reply: CommandReply
        reply, _ = await gather_calls(self._sample(ended), self._fetch(ended))
        return reply

    async def _sample(self, ended: Sequence[asyncio.Event]) -> CommandReply:
        reply = await self._sampler.client.generate(
            self.slot,
            self._sampling,
            base_step=self._base_step,
            num_parts=len(self._slots),
            on_part=lambda part: ended[part - 1].set(),
        )
        for event in ended:
            event.set()
        if not self._for_actor:
            self.on_actor.set()
        return reply

    async def _fetch(self, ended: Sequence[asyncio.Event]) -> None:
        """Fetches each part when it has ended. Rows that come in another part than before are added to the next one."""
        is_streamed = len(self._slots) > 1
        columns = [*self._columns, "places"] if is_streamed else self._columns
        known = self._places()
        late: list[Batch] = []
        for slot, event, awaited in zip(self._slots, ended, self._fetched, strict=True):
            await event.wait()
            rows = await self._sampler.client.get_batch(slot, columns)
            places = rows["places"].values if is_streamed else np.arange(rows.num_rows)
            is_new = ~np.isin(places, known)
            late.append(rows if is_new.all() else rows.take(np.flatnonzero(is_new)))
            if not awaited.done():
                awaited.set_result(self._part(slot, concatenate(late)))
                late = []

    def _part(self, slot: Slot, rows: Batch) -> RolloutPart:
        places = rows["places"].values if "places" in rows else np.arange(rows.num_rows)
        prompts = self._asked.take(places)
        return RolloutPart(slot, places, prompts, Batch(rows.num_rows, {"prompts": prompts.prompts}).merge(rows))
