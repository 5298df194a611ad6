"""Makes the rollouts of a PPO step: the prompts that come next, and the responses that the step learns from.

Without dynamic sampling these are the responses to the next batch of prompts. With it, prompts are taken until enough
groups of samples differ in score. A group is a prompt with its responses; one batch of prompts with its responses is a
round, which is scored before the next one begins. The kept groups depend on the weights, the next prompts and seeds
only on how many prompts were taken before.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
from numpy.typing import NDArray

from controller.data.prompts import NO_ROWS, PROMPT_COLUMNS, Answered, PromptBatch, PromptSource
from controller.ppo.masked_stats import Float32s
from controller.ppo.scores import Scores
from controller.run.end import RunEnd
from controller.sampling.keep import Groups, KeptGroups, keep_differing
from controller.sampling.stream import CONVERSATION_COLUMNS, UPDATE_COLUMNS, Asked, GrowingList, Part, in_order, sample
from controller.sampling.talk import Talk
from controller.step.context import StepContext
from controller.step.finished import FinishedRollouts, Origin
from controller.step.parts import PartCalls, PendingRollouts
from controller.workers.clients import sampling_params
from splitppo.batch import Batch
from splitppo.config import Config
from splitppo.v1.actor_pb2 import SamplingParams
from splitppo.v1.batch_pb2 import SLOT_KIND_CANDIDATES, SLOT_KIND_EXPERIENCE, SLOT_KIND_GREEDY, Slot


class SampledRollouts:
    """The responses that are sampled for a batch of prompts of a step, in parts; a `PendingRollouts`."""

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
        """Prepares sampling; `earlier` is passed to `PromptBatch.to_batch`, `columns` are those of the rollouts."""
        config = step.config
        environments = step.sampling.environments
        params = sampling_params(config.rollout, config.data)
        if is_greedy:
            params = SamplingParams(temperature=0.0, top_p=1.0, max_response_length=params.max_response_length)
        num_samples = 1 if is_greedy else config.rollout.n
        seeded = prompts.to_batch(config.run.seed, step.number, num_samples, earlier=earlier)
        names = [f"{slot.kind}.{seed}" for seed in seeded["seeds"].values]
        prompts_B = prompts.repeated(num_samples)
        self._step = step
        self._timing = "gen_max" if is_greedy else "gen"
        self._asked = Asked(
            prompts=prompts,
            seeded=seeded,
            version=step.base_step,
            params=params,
            slot=slot,
            num_parts=num_parts,
            columns=columns if environments is None else (*columns, *CONVERSATION_COLUMNS),
            talk=Talk.about(environments, prompts_B, config.run.seed, step.number, names, step.privileged),
        )
        self.slot = slot
        self.prompts = prompts
        self.scores: Scores | None = None
        self.greedy_scores: Float32s | None = None
        self.on_actor = asyncio.Event()
        self.parts: GrowingList[Part] = GrowingList()

    @classmethod
    def of_step(cls, step: StepContext, prompts: PromptBatch) -> Self:
        """Makes the rollouts of a step: `rollout.n` responses per prompt, in `rollout.stream_groups` parts."""
        num_parts = step.config.rollout.stream_groups
        assert num_parts != "auto", "load resolves it"
        return cls(step, prompts, Slot(kind=SLOT_KIND_EXPERIENCE, step=step.number), num_parts=num_parts)

    @classmethod
    def of_candidates(cls, step: StepContext, prompts: PromptBatch, *, number: int, earlier: NDArray[np.int64]) -> Self:
        """Makes the rollouts of round `number` (from 1) of dynamic sampling; the step keeps some of the rollouts.

        `earlier` are the row indices of the step's earlier rounds. A prompt that is among them gets other seeds.
        """
        slot = Slot(kind=SLOT_KIND_CANDIDATES, step=step.number, part=number)
        return cls(step, prompts, slot, earlier=earlier, columns=UPDATE_COLUMNS)

    @classmethod
    def greedy(cls, step: StepContext, prompts: PromptBatch) -> Self:
        """Makes the greedy rollouts of a step: one response per prompt, always with the most likely token."""
        return cls(step, prompts, Slot(kind=SLOT_KIND_GREEDY, step=step.number), is_greedy=True)

    async def generate(self) -> Batch:
        """Has the responses sampled; returns prompts and columns, ordered by prompt, then sample."""
        record = self._step.record
        with record.timed(self._timing):
            async for part in sample(self._step.sampling, self._asked, record, on_actor=self.on_actor):
                self.parts.append(part)
            self.parts.complete()
            columns = (*self.prompts.column_names, *self._asked.columns)
            return in_order([part.rollouts.select(columns) for part in self.parts.items], self.parts.items)

    def answered(self, scores_B: Float32s) -> Sequence[Answered]:
        return [(self.prompts, scores_B)]


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
        rollouts = self.groups.rollouts
        self.slot = Slot(kind=SLOT_KIND_EXPERIENCE, step=self.step.number)
        self.on_actor = asyncio.Event()
        self.prompts = self.groups.prompts
        self.scores: Scores | None = self.groups.scores
        names = (*PROMPT_COLUMNS, "responses", *CONVERSATION_COLUMNS)
        self._kept = rollouts.select(name for name in names if name in rollouts)
        self.parts = GrowingList([self._only_part()], is_complete=True)

    def _only_part(self) -> Part:
        """Returns all kept responses as one part, each with its prompt.

        Where responses are conversations, the prompts have what their environments said first, as when they were
        sampled.
        """
        num_rows = self.groups.rollouts.num_rows
        asked = self.prompts.repeated(num_rows // self.prompts.num_prompts)
        talks = [talk for talk in self.groups.scores.conversations if talk is not None]
        if talks:
            rows = (talk.row_as_begun(row) for row, talk in zip(asked.rows, talks, strict=True))
            asked = replace(asked, rows=tuple(rows))
        return Part(self.slot, np.arange(num_rows), asked, self._kept, talks)

    async def generate(self) -> Batch:
        """Puts the kept rollouts into the actor's slot for the step, and returns prompts and responses."""
        with self.step.record.timed("gen"):
            await self.step.workers.actor.put_batch(self.slot, self.groups.rollouts)
        self.on_actor.set()
        return self._kept

    def answered(self, scores_B: Float32s) -> Sequence[Answered]:  # noqa: ARG002 - of PendingRollouts
        """Returns `all_answered`."""
        return self.all_answered


class StepRollouts:
    """Takes the prompts of each PPO step from the training data, and makes the rollouts that the step learns from.

    Attributes:
        prompts: the order of the prompts.
        file_of_next: makes the content of the file with the next step's rollouts, if they are finished:
            `RolloutsAhead`.

    Raises:
        TooFewSampleGroups: too few groups have samples that differ.
        ConfigError: the scorer does not return the metric by which samples are compared.
    """

    def __init__(self, prompts: PromptSource) -> None:
        self.prompts = prompts
        self.file_of_next: Callable[[], bytes] | None = None
        self._rounds_per_epoch = prompts.num_steps(1)

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
            groups = await self._round(step, first_draw, 1, NO_ROWS)
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
        filters = step.config.algorithm.filter_groups
        num_prompts = step.config.data.train_batch_size
        kept = KeptGroups(filters, num_prompts, step.number, rounds_per_epoch=self._rounds_per_epoch)

        async def sample_round(number: int, earlier: NDArray[np.int64]) -> Groups:
            return await self._round(step, first_draw + number - 1, number, earlier)

        with step.record.timed("dynamic_sampling"):
            await keep_differing(kept, sample_round)
            step.record.metrics |= kept.metrics()
            return kept.first(), kept.answered

    def _next_prompts(self, step: StepContext, draw: int) -> PromptBatch:
        """Returns batch number `draw` of the training prompts, and records its data epoch as that of the step."""
        prompts = self.prompts.batch_at(draw)
        step.record.epoch = self.prompts.epoch_of(draw)
        return prompts

    async def _round(self, step: StepContext, draw: int, number: int, earlier: NDArray[np.int64]) -> Groups:
        """Samples and scores responses to one batch of prompts: round `number` (from 1) of the step.

        `finish` also calls it without dynamic sampling, for the step ahead. `earlier` are the row indices of the
        prompts of the step's rounds before. The reward model is asked unless groups are compared by another metric.
        """
        config = step.config
        filters = config.algorithm.filter_groups
        prompts = self._next_prompts(step, draw)
        candidates = SampledRollouts.of_candidates(step, prompts, number=number, earlier=earlier)
        num_examine = config.reward.num_examine if number == 1 else 0
        asks_reward_model = filters.compares_scores or not filters.enable
        calls = PartCalls(step, candidates, asks_reward_model=asks_reward_model, num_examine=num_examine)
        rollouts, scores = await calls.generate_and_score()
        return Groups(prompts, rollouts, scores)
