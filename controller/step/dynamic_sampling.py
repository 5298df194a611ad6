"""Makes the rollouts of a PPO step, also by dynamic sampling, which drops prompts whose responses all score the same.

A group is a prompt with its responses. Dynamic sampling takes prompts and has the actor answer them until the step has
enough groups whose responses differ in score. One batch of prompts with its responses is a generation; it is scored
before the next one begins. The kept groups depend on the weights, the next prompts and seeds only on how many prompts
were taken before.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from controller.data.prompts import NO_ROWS, Answered, PromptBatch, PromptSource
from controller.ppo.masked_stats import Float32s
from controller.ppo.scores import Scores
from controller.run.end import RunEnd
from controller.sampling.keep import Groups, KeptGroups
from controller.step.context import StepContext
from controller.step.finished import FinishedRollouts, Origin
from controller.step.parts import PartCalls, PendingRollouts, RolloutPart, of_controller
from controller.step.rollouts import SampledRollouts
from splitppo.batch import Batch
from splitppo.config import Config
from splitppo.v1.batch_pb2 import SLOT_KIND_EXPERIENCE, Slot


class StepRollouts:
    """Takes the prompts of each PPO step from the training data, and makes the rollouts that the step learns from.

    Attributes:
        prompts: the order of the prompts.
        file_of_next: makes the content of the file with the next step's rollouts, if they are finished:
            `RolloutsAhead`.

    Raises:
        GroupsRanOut: too few groups have samples that differ.
        ConfigError: the scorer does not return the metric by which samples are compared.
    """

    def __init__(self, prompts: PromptSource) -> None:
        self.prompts = prompts
        self.file_of_next: Callable[[], bytes] | None = None
        self._generations_per_epoch = prompts.num_steps(1)

    async def draw(self, step: StepContext, first_draw: int) -> PendingRollouts:
        """Makes the rollouts of a step; `first_draw` is the number of the step's first batch of prompts."""
        if step.config.algorithm.filter_groups.enable:
            return KeptRollouts(step, *await self._differing(step, first_draw))
        return SampledRollouts.of_step(step, self._next_prompts(step, first_draw))

    async def look_ahead(self, step: StepContext, config: Config, end: RunEnd, first_draw: int) -> None:
        """Does nothing here; in `RolloutsAhead`, samples the next step's rollouts with the weights before `step`."""

    async def before_update(self) -> None:
        """Does nothing here; in `RolloutsAhead`, waits until `look_ahead` needs the models of this step no more."""

    def check_next(self) -> None:
        """Does nothing here; in `RolloutsAhead`, raises the error that kept `look_ahead` from filling the next step."""

    async def finish(self, step: StepContext, first_draw: int) -> FinishedRollouts:
        """Samples and scores the rollouts of a step with the actor's present weights, greedy rollouts included."""
        config = step.config
        greedy_scores = None
        if config.algorithm.filter_groups.enable:
            groups, answered = await self._differing(step, first_draw)
        else:
            groups = await self._generation(step, first_draw, 1, NO_ROWS)
            answered = [(groups.prompts, groups.scores.scores)]
        if config.algorithm.needs_greedy_scores:
            greedy = SampledRollouts.greedy(step, groups.prompts)
            greedy_scores = await PartCalls(step, greedy, is_baseline=True).greedy_scores()
        origin = Origin(step.number, step.base_step, step.record.epoch, step.record.metrics)
        return FinishedRollouts(origin, groups, answered, greedy_scores)

    async def _differing(self, step: StepContext, first_draw: int) -> tuple[Groups, Sequence[Answered]]:
        """Samples and scores responses until those of `data.train_batch_size` prompts differ in their scores.

        Returns the groups that the step learns from, and all prompts with their scores.
        """
        config = step.config
        per_epoch = self._generations_per_epoch
        filters = config.algorithm.filter_groups
        num_prompts = config.data.train_batch_size
        groups = KeptGroups(filters, num_prompts, step.number, generations_per_epoch=per_epoch)
        with step.record.timed("dynamic_sampling"):
            while not groups.is_full:
                groups.check()
                number = groups.num_generations
                groups.add(await self._generation(step, first_draw + number, number + 1, groups.drawn_rows))
            step.record.metrics |= groups.metrics()
            return groups.first(), groups.answered

    def _next_prompts(self, step: StepContext, draw: int) -> PromptBatch:
        """Returns batch number `draw` of the training prompts, and records its data epoch as that of the step."""
        prompts = self.prompts.batch_at(draw)
        step.record.epoch = self.prompts.epoch_of(draw)
        return prompts

    async def _generation(self, step: StepContext, draw: int, number: int, earlier: NDArray[np.int64]) -> Groups:
        """Samples and scores responses to one batch of prompts: generation `number` (from 1) of the step."""
        config = step.config
        prompts = self._next_prompts(step, draw)
        filters = step.config.algorithm.filter_groups
        candidates = SampledRollouts.of_candidates(step, prompts, generation=number, earlier=earlier)
        num_examine = config.reward.num_examine if number == 1 else 0
        asks_model = filters.compares_scores or not filters.enable
        calls = PartCalls(step, candidates, asks_model=asks_model, num_examine=num_examine)
        return Groups(prompts, *await calls.generate_and_score())


@dataclass(eq=False)
class KeptRollouts:
    """Rollouts of a step that are already sampled and scored; a `PendingRollouts` that has only one part.

    Attributes:
        all_answered: all prompts that were taken for the step, also dropped ones, with scores before penalties.
    """

    step: StepContext
    groups: Groups
    all_answered: Sequence[Answered]
    greedy_scores: Float32s | None = None

    def __post_init__(self) -> None:
        self.slot = Slot(kind=SLOT_KIND_EXPERIENCE, step=self.step.number)
        self.on_actor = asyncio.Event()
        self.prompts = self.groups.prompts
        self.scores: Scores | None = self.groups.scores
        self.order = np.arange(self.groups.rollouts.num_rows)
        self._kept = self.groups.rollouts.select(of_controller(self.groups.rollouts))

    async def generate(self) -> Batch:
        """Puts the kept rollouts into the actor's slot for the step, and returns prompts and responses."""
        with self.step.record.timed("gen"):
            await self.step.workers.actor.put_batch(self.slot, self.groups.rollouts)
        self.on_actor.set()
        return self._kept

    async def parts(self) -> AsyncIterator[RolloutPart]:
        assert self.scores is not None
        asked = self.prompts.repeated(len(self.order) // self.prompts.num_prompts)
        if talks := [talk for talk in self.scores.conversations if talk is not None]:
            rows = (replace(row, observation=talk.beginning) for row, talk in zip(asked.rows, talks, strict=True))
            asked = replace(asked, rows=tuple(rows))
        yield RolloutPart(self.slot, self.order, asked, self._kept, talks)

    def answered(self, scores_B: Float32s) -> Sequence[Answered]:  # noqa: ARG002 - of PendingRollouts
        """Returns `all_answered`."""
        return self.all_answered
