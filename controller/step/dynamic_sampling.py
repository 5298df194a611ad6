"""The rollouts of a step: still to be sampled, or, with dynamic sampling, kept out of more rollouts.

Dynamic sampling draws and answers prompts until the step has enough groups whose samples differ. Every generation is
scored before the next one is drawn. The kept groups depend on the weights. The next prompts and seeds depend only on
the number of prompts that were drawn before.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence

import numpy as np

from controller.data.prompts import Answered, PromptBatch, PromptSource
from controller.ppo.masked_stats import Float32s
from controller.ppo.scores import Scores
from controller.schedule import run_calls
from controller.step.context import StepContext
from controller.step.generation import SampledRollouts
from controller.step.kept_groups import Groups, KeptGroups
from controller.step.parts import PartCalls, PendingRollouts, RolloutPart
from splitppo.batch import Batch
from splitppo.v1.batch_pb2 import SLOT_KIND_EXPERIENCE, Slot


class StepRollouts:
    """Draws the prompts of each step, and makes the rollouts that the step learns from.

    Raises:
        GroupsRanOut: too few groups have samples that differ.
        ConfigError: the scorer does not return the metric by which samples are compared.
    """

    def __init__(self, prompts: PromptSource) -> None:
        self._prompts = prompts
        self._generations_per_epoch = prompts.num_steps(1)

    async def draw(self, step: StepContext, first_draw: int) -> PendingRollouts:
        """Returns the rollouts of a step, whose first batch of prompts has the number `first_draw`."""
        if not step.config.algorithm.filter_groups.enable:
            return SampledRollouts.of_step(step, self._next_prompts(step, first_draw))
        with step.record.timed("dynamic_sampling"):
            groups = await self._fill(step, first_draw)
            step.record.metrics |= groups.metrics()
            return KeptRollouts(step, groups.first(), groups.answered)

    def _next_prompts(self, step: StepContext, draw: int) -> PromptBatch:
        """Returns the batch of prompts with this number. A step belongs to the data epoch of its last batch."""
        prompts = self._prompts.batch_at(draw)
        step.record.epoch = self._prompts.epoch_of(draw)
        return prompts

    async def _fill(self, step: StepContext, first_draw: int) -> KeptGroups:
        """Samples and scores candidates until `data.train_batch_size` groups have samples that differ."""
        config, filters = step.config, step.config.algorithm.filter_groups
        num_prompts, per_epoch = config.data.train_batch_size, self._generations_per_epoch
        groups = KeptGroups(filters, num_prompts, step.number, generations_per_epoch=per_epoch)
        while not groups.is_full:
            groups.check()
            num_done = groups.num_generations
            prompts = self._next_prompts(step, first_draw + num_done)
            candidates = SampledRollouts.of_candidates(
                step, prompts, generation=num_done + 1, earlier=groups.drawn_rows
            )
            num_examine = 0 if num_done else config.reward.num_examine
            calls = PartCalls(step, candidates, asks_model=filters.compares_scores, num_examine=num_examine)
            rollouts, scores = await run_calls(config.run.schedule, candidates.generate, calls.scores)
            groups.add(Groups(prompts, rollouts, scores))
        return groups


class KeptRollouts:
    """The rollouts that a step has kept. They are sampled and scored already, and a single part (`PendingRollouts`)."""

    def __init__(self, step: StepContext, groups: Groups, answered: Sequence[Answered]) -> None:
        self._step = step
        self._rollouts = groups.rollouts
        self._answered = answered
        self.slot = Slot(kind=SLOT_KIND_EXPERIENCE, step=step.number)
        self.prompts = groups.prompts
        self.scores: Scores | None = groups.scores
        self.on_actor = asyncio.Event()
        self.order = np.arange(groups.rollouts.num_rows)

    async def generate(self) -> Batch:
        """Puts the rollouts into the slot in which the actor leaves rollouts without dynamic sampling."""
        with self._step.record.timed("gen"):
            await self._step.workers.actor.put_batch(self.slot, self._rollouts)
        self.on_actor.set()
        return self._rollouts.select(("prompts", "responses"))

    async def parts(self) -> AsyncIterator[RolloutPart]:
        asked = self.prompts.repeated(len(self.order) // self.prompts.num_prompts)
        yield RolloutPart(self.slot, self.order, asked, self._rollouts.select(("prompts", "responses")))

    def answered(self, scores_B: Float32s) -> Sequence[Answered]:  # noqa: ARG002 - of PendingRollouts
        """Returns the prompts of every generation, with the scores that were compared, before any penalty."""
        return self._answered
