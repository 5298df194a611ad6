"""Makes the rollouts of a PPO step from partial rollouts: a step samples some tokens of each response, not all.

B prompts are learned from in a step (`data.train_batch_size`), with n responses to each, of at most L tokens; C tokens
of each response are sampled at a time (`rollout.max_step_tokens`). A prompt is *complete* when all of its responses
have ended. A complete prompt *waits* until a step learns from it; a prompt that was drawn and is not complete, and its
unfinished responses, are *pending*.

What is drawn, sampled and learned from depends on numbers of tokens alone, never on time: a run can be repeated.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from math import ceil

import numpy as np
from numpy.typing import NDArray

from controller.data.prompts import NO_ROWS, Answered, PromptBatch, PromptSource
from controller.ppo.masked_stats import Float32s
from controller.ppo.scores import Scores
from controller.sampling.stream import UPDATE_COLUMNS, Asked, GrowingList, Part, sample
from controller.schedule import run_calls
from controller.step.context import StepContext
from controller.step.pool import RolloutPool, UnlearnedPrompts
from controller.step.probe import Probe
from controller.step.rollouts import StepRollouts
from controller.workers.clients import sampling_params
from splitppo.batch import Batch
from splitppo.v1.batch_pb2 import SLOT_KIND_CANDIDATES, SLOT_KIND_EXPERIENCE, Slot


class PartialRollouts(StepRollouts):
    """Makes the rollouts of each step from responses that earlier steps have begun (`rollout.max_step_tokens`).

    A step draws prompts in the run's order, has C tokens of every unfinished response sampled with its weights, and
    learns from the B complete prompts that were drawn first. While fewer than B are complete, the same weights sample
    another C tokens, in one more *round*. Before each round, prompts are drawn until

        unfinished responses  >=  `rollout.overcommit` x B x n,
        or waiting and pending prompts  =  2 B,
        or all prompts are drawn that the steps up to `run.total_steps` learn from.

    Of the 2 B prompts, the step takes B, so that at most B wait after it, whatever completes in it. In the last steps
    nothing is drawn that no step could learn from, and they complete what is pending: no response is thrown away.

    **No token is older than ceil(L / C) updates**: the weights that learn from it come that many updates after those
    that sampled it, at most. Proof. A prompt is drawn in step s. Every step has a round, unless no response is
    unfinished. So after the rounds of step t = s + ceil(L / C) - 1, this prompt is complete, and so are all that were
    drawn before it. After step t, at most B prompts wait or are pending. If this prompt still waits, it is therefore
    among the first B complete ones of step t + 1, which learns from it. The first tokens are from the weights of step
    s - 1, at the earliest, and step t + 1 begins with the weights of step t: t - (s - 1) = ceil(L / C) updates.

    A checkpoint of a step also stores what is pending or waits after it.
    """

    def __init__(self, prompts: PromptSource, unlearned: UnlearnedPrompts) -> None:
        super().__init__(prompts)
        self._keep(unlearned)

    async def draw(self, step: StepContext, first_draw: int) -> "CompleteRollouts":
        """Samples until enough prompts are complete; returns the rollouts of those that were drawn first."""
        rounds = _Rounds(step, self.prompts, self._unlearned, first_draw)
        with step.record.timed("gen"):
            await self._compare_and_run(step, rounds)
        pool = rounds.unlearned.pool
        places = pool.complete[: step.config.data.train_batch_size]
        learned = pool.take(places)
        rest = pool.without(places)
        self._keep(replace(rounds.unlearned, pool=rest))
        step.record.epoch = int(learned.epochs.max())
        step.record.versions = learned.token_versions()
        step.record.metrics |= {**rounds.metrics(learned), **_ages(learned, step.base_step), **_left(rest)}
        return CompleteRollouts(step, learned)

    async def _compare_and_run(self, step: StepContext, rounds: "_Rounds") -> None:
        """Runs the rounds of a step; a rollout group's weights are compared with the actor's meanwhile."""
        if step.sampling.rollout is None:
            await rounds.run()
            return
        probe = Probe(step, self.prompts.table)
        rows = await probe.sample()
        await run_calls(step.config.run.schedule, partial(probe.compare, rows), rounds.run)

    def _keep(self, unlearned: UnlearnedPrompts) -> None:
        self._unlearned = unlearned
        self.file_of_next = unlearned.serialise if unlearned.num_prompts else None


def num_to_draw(num_prompts: int, num_unfinished: int, num_samples: int, *, num_wanted: float, most: int) -> int:
    """Returns how many prompts are drawn before a round, so that at least `num_wanted` responses are unfinished.

    `num_prompts` are pending or wait already, and have `num_unfinished` unfinished responses. With the drawn ones they
    are at most `most`.
    """
    num_lacking = ceil((num_wanted - num_unfinished) / num_samples)
    return max(0, min(num_lacking, most - num_prompts))


class _Rounds:
    """The rounds of one step: prompts are drawn, and tokens are sampled, until a batch of prompts is complete.

    Attributes:
        unlearned: what is pending or waits by now, and what was taken from the run's order and is not drawn.
    """

    def __init__(self, step: StepContext, prompts: PromptSource, unlearned: UnlearnedPrompts, first_draw: int) -> None:
        """`first_draw` is the number of the batch with which the step would begin if nothing had been drawn ahead."""
        config = step.config
        assert config.run.total_steps is not None, "Inputs.with_last_step has set it"
        assert config.rollout.max_step_tokens is not None, "else rollouts are not partial"
        self._step = step
        self._prompts = prompts
        self.unlearned = unlearned
        self._batch_size = config.data.train_batch_size
        self._max_step_tokens = config.rollout.max_step_tokens
        self._num_wanted = config.rollout.overcommit * self._batch_size * config.rollout.n
        num_steps = config.run.total_steps - step.number + 1
        self._max_prompts = self._batch_size * min(2, num_steps)
        self._next_batch = first_draw + unlearned.num_prompts // self._batch_size
        self._drawn_rows = NO_ROWS  # the row indices of the prompts that this step has drawn
        self._num_rounds = 0
        self._num_sampled = 0  # tokens
        self._num_ended = 0  # responses

    async def run(self) -> None:
        """Draws and samples round after round until a batch of prompts is complete."""
        while True:
            self._draw()
            await self._sample()
            if len(self.unlearned.pool.complete) >= self._batch_size:
                return

    def _draw(self) -> None:
        """Draws as many prompts as the next round has room for, and begins their responses."""
        pool = self.unlearned.pool
        n = pool.num_samples
        num_prompts = num_to_draw(
            pool.num_prompts, pool.num_unfinished, n, num_wanted=self._num_wanted, most=self._max_prompts
        )
        if not num_prompts:
            return
        prompts, epochs = self._take_next(num_prompts)
        config = self._step.config
        seeded = prompts.to_batch(config.run.seed, self._step.number, n, earlier=self._drawn_rows)
        begun = RolloutPool.begun(prompts, epochs, seeded["seeds"].values, n)
        self.unlearned = replace(self.unlearned, pool=pool.with_drawn(begun))
        self._drawn_rows = np.concatenate([self._drawn_rows, prompts.row_indices])

    def _take_next(self, num_prompts: int) -> tuple[PromptBatch, NDArray[np.int64]]:
        """Takes the next prompts of the run's order, and returns them with their data epochs."""
        undrawn = self.unlearned.undrawn
        epochs = np.full(undrawn.num_prompts, self.unlearned.undrawn_epoch, np.int64)
        while undrawn.num_prompts < num_prompts:
            batch = self._prompts.batch_at(self._next_batch)
            of_batch = np.full(batch.num_prompts, self._prompts.epoch_of(self._next_batch), np.int64)
            self._next_batch += 1
            undrawn = PromptBatch.join([undrawn, batch])
            epochs = np.concatenate([epochs, of_batch])
        rest = undrawn.take(np.arange(num_prompts, undrawn.num_prompts))
        self.unlearned = replace(self.unlearned, undrawn=rest, undrawn_epoch=int(epochs[-1]))
        return undrawn.take(np.arange(num_prompts)), epochs[:num_prompts]

    async def _sample(self) -> None:
        """Has up to C more tokens of every unfinished response sampled with the weights of the step."""
        pool = self.unlearned.pool
        if not pool.num_unfinished:
            return
        step = self._step
        config = step.config
        self._num_rounds += 1
        prompts, seeded = pool.asked()
        asked = Asked(
            prompts=prompts,
            seeded=seeded,
            version=step.base_step,
            params=sampling_params(config.rollout, config.data),
            slot=Slot(kind=SLOT_KIND_CANDIDATES, step=step.number, part=self._num_rounds),
            columns=("responses", "rollout_log_probs", "unfinished"),
            max_step_tokens=self._max_step_tokens,
        )
        [part] = [part async for part in sample(step.sampling, asked, step.record)]
        grown = pool.grown(part.rollouts, step.base_step)
        self._num_sampled += grown.num_tokens - pool.num_tokens
        self._num_ended += pool.num_unfinished - grown.num_unfinished
        self.unlearned = replace(self.unlearned, pool=grown)

    def metrics(self, learned: RolloutPool) -> dict[str, float]:
        """Returns the metrics of what the step has drawn and sampled, beside what it learns from."""
        metrics = {"partial/num_rounds": float(self._num_rounds), "partial/num_drawn": float(len(self._drawn_rows))}
        if self._num_ended:
            learned_mean = learned.num_tokens / learned.rollouts.num_rows
            metrics["partial/length_ratio"] = learned_mean / (self._num_sampled / self._num_ended)
        return metrics


def _ages(learned: RolloutPool, version: int) -> dict[str, float]:
    """Returns how many updates the tokens are old that a step learns from, which has the weights of `version`."""
    ages = version - learned.token_versions().values
    if not len(ages):
        return {}
    shares = np.bincount(ages) / len(ages)
    metrics = {f"partial/age_share/{age}": float(share) for age, share in enumerate(shares) if share}
    return metrics | {"training/staleness": float(ages.mean()), "partial/max_age": float(ages.max())}


def _left(pool: RolloutPool) -> dict[str, float]:
    """Returns how much is pending and waits after a step."""
    return {"partial/num_pending": float(pool.num_unfinished), "partial/num_waiting": float(len(pool.complete))}


class CompleteRollouts:
    """Rollouts of a step that are complete and not scored yet; a `PendingRollouts` that has only one part."""

    def __init__(self, step: StepContext, pool: RolloutPool) -> None:
        """`pool` has the prompts of the step, with their responses."""
        self._step = step
        self._rollouts = pool.rollouts.select(["prompts", *UPDATE_COLUMNS])
        self._sent = pool.rollouts.select(["prompts", "responses"])
        self.slot = Slot(kind=SLOT_KIND_EXPERIENCE, step=step.number)
        self.prompts = pool.prompts
        self.scores: Scores | None = None
        self.greedy_scores: Float32s | None = None
        self.on_actor = asyncio.Event()
        rows = np.arange(self._sent.num_rows)
        only_part = Part(self.slot, rows, pool.prompts.repeated(pool.num_samples), self._sent)
        self.parts = GrowingList([only_part], is_complete=True)

    async def generate(self) -> Batch:
        """Puts the rollouts into the actor's slot for the step, and returns prompts and responses."""
        with self._step.record.timed("gen"):
            await self._step.workers.actor.put_batch(self.slot, self._rollouts)
        self.on_actor.set()
        return self._sent

    def answered(self, scores_B: Float32s) -> Sequence[Answered]:
        """Returns the prompts that the step learns from, with the scores of their responses."""
        return [(self.prompts, scores_B)]
