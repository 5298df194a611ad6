"""Has responses sampled in parts; finished parts can be scored while others are generated."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Self

import numpy as np
from numpy.typing import NDArray

from controller.conversations.conversation import mask_lost
from controller.data.prompts import NO_ROWS, Answered, PromptBatch
from controller.ppo.masked_stats import Float32s
from controller.ppo.scores import Scores
from controller.sampling.stream import Share, deal
from controller.sampling.talk import conversations_of
from controller.schedule import run_calls
from controller.step.context import StepContext
from controller.step.parts import RolloutPart, in_order, of_controller
from controller.workers.clients import sampling_params
from splitppo.batch import Batch, row_order
from splitppo.v1.actor_pb2 import SamplingParams
from splitppo.v1.batch_pb2 import SLOT_KIND_CANDIDATES, SLOT_KIND_EXPERIENCE, SLOT_KIND_GREEDY, Slot

_ALL_COLUMNS = ("responses", "rollout_log_probs", "seeds")


class SampledRollouts:
    """The responses that are sampled for a batch of prompts, in parts; a `PendingRollouts`.

    If several groups sample, each has its own parts. The parts are numbered as they arrive. Only calls that compute row
    by row work on parts, so that their results are the same in any order; `in_order` puts them into the order of the
    prompts.
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
        """Prepares sampling; `earlier` is passed to `PromptBatch.to_batch`, `columns` are fetched from the samplers."""
        self._actor = step.workers.actor
        self._record = step.record
        self._base_step = step.base_step
        self._schedule = step.config.run.schedule
        self._sampling = sampling_params(step.config.rollout, step.config.data)
        num_samples = step.config.rollout.n
        if is_greedy:
            num_samples = 1
            limit = self._sampling.max_response_length
            self._sampling = SamplingParams(temperature=0.0, top_p=1.0, max_response_length=limit)
        seeded = prompts.to_batch(step.config.run.seed, step.number, num_samples, earlier=earlier)
        self._shares = deal(step.workers.sampler, seeded, slot, num_parts)
        self._is_whole = [share.num_parts for share in self._shares] == [1]
        has_all = [share.client for share in self._shares] == [self._actor]
        self._for_actor = slot.kind == SLOT_KIND_EXPERIENCE and not has_all
        asked = prompts.repeated(num_samples)
        run_seed = step.config.run.seed
        names = [f"{slot.kind}.{seed}" for seed in seeded["seeds"].values]
        self._conversations = conversations_of(step.environments, asked, run_seed, step.number, names)
        self._columns = (*(_ALL_COLUMNS if self._for_actor else columns), *self._conversations.columns)
        self._timing = "gen_max" if is_greedy else "gen"
        self.slot = slot
        self.prompts = prompts
        self.scores: Scores | None = None
        self.greedy_scores: Float32s | None = None
        self.on_actor = asyncio.Event()
        self._parts: list[RolloutPart] = []
        self._all_parts = False
        self._news = asyncio.Event()

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
            async with self._conversations:
                await run_calls(self._schedule, *(partial(self._sample, share) for share in self._shares))
            self._record.add_environments(self._conversations.spans(self._record.step))
            self._all_parts = True
            self._news.set()
            rollouts = in_order([part.rollouts.select(("prompts", *self._columns)) for part in self._parts], self.order)
            if self._for_actor:
                await self._actor.put_batch(self.slot, rollouts)
                rollouts = rollouts.select(of_controller(rollouts))
        self.on_actor.set()
        return rollouts

    async def _sample(self, share: Share) -> None:
        may_compute = share.client is self._actor and not self._for_actor
        reply = await share.sample(
            self._base_step,
            self._sampling,
            self._columns,
            on_reply=self._record.add_reply,
            on_rows=self._add,
            on_sampled=self.on_actor.set if may_compute else lambda: None,
            converse=self._conversations.converse,
        )
        places = [part.tolist() for part in share.fetched]
        self._record.add_reply(share.client.role, "gen", reply, parts=() if self._is_whole else places)

    async def parts(self) -> AsyncIterator[RolloutPart]:
        """Yields each part of the responses as soon as it has arrived. Several callers may iterate."""
        number = 0
        while number < len(self._parts) or not self._all_parts:
            if number == len(self._parts):
                await self._news.wait()
                continue
            yield self._parts[number]
            number += 1

    @property
    def order(self) -> NDArray[np.int64]:
        return row_order(np.concatenate([part.places for part in self._parts]))

    def answered(self, scores_B: Float32s) -> Sequence[Answered]:
        return [(self.prompts, scores_B)]

    def _add(self, rows: Batch) -> None:
        """Adds responses that have arrived, as the next part, and wakes those who wait for it."""
        places = rows["places"].values
        slot = self.slot
        prompts = self._conversations.asked.take(places)
        conversations = self._conversations.at(places.tolist())
        rows = mask_lost(rows, conversations)
        if self._is_whole:
            rows = rows.select(self._columns)
        else:
            slot = Slot(kind=slot.kind, step=slot.step, part=len(self._parts) + 1)
        rollouts = Batch(rows.num_rows, {"prompts": prompts.prompts}).merge(rows)
        self._parts.append(RolloutPart(slot, places, prompts, rollouts, conversations))
        self._news.set()
        self._news = asyncio.Event()
