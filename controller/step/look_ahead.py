"""Samples rollouts one step ahead: a step learns from rollouts of the weights before the update of the step before.

The actor samples them before its update. A rollout group has these weights in files, and samples beside the update.
"""

import asyncio
import logging
from dataclasses import replace
from functools import partial
from math import inf

from controller.data.prompts import PromptSource
from controller.run.end import RunEnd
from controller.sampling.keep import TooFewSampleGroups
from controller.schedule import run_calls
from controller.step.context import StepContext
from controller.step.finished import FinishedRollouts
from controller.step.partial import PartialRollouts
from controller.step.pool import UnlearnedPrompts
from controller.step.probe import Probe
from controller.step.rollouts import KeptRollouts, StepRollouts
from controller.tracking.step_record import StepRecord
from splitppo.clock import unix_s
from splitppo.config import Config

log = logging.getLogger(__name__)


class RolloutsAhead(StepRollouts):
    """Makes the rollouts of each step one step ahead, before the update of the step before it (`rollout.staleness` 1).

    v_k are the weights after the update of step k, v_0 the initial ones. Step k learns from rollouts of v_{k-2}, step 1
    from those of v_0. Step k never learns from other weights' rollouts, however fast the worker groups are, so that
    runs can be repeated.

    A checkpoint of a step also stores the finished rollouts of the next step.
    """

    def __init__(self, prompts: PromptSource, finished: FinishedRollouts | None) -> None:
        super().__init__(prompts)
        self._keep(finished)
        self._num_draws = 0  # for the running step
        self._may_update = asyncio.Event()
        self._ran_out: TooFewSampleGroups | None = None

    async def draw(self, step: StepContext, first_draw: int) -> KeptRollouts:
        """Returns the rollouts that were sampled for this step; samples them now if there are none."""
        self.check_next()
        finished = self._next
        self._keep(None)
        if finished is None:
            if step.number > 1:
                version = step.base_step
                log.info("step %d has no rollouts yet: the weights of step %d sample them now", step.number, version)
            finished = await self.finish(step, first_draw)
        self._num_draws = len(finished.answered)
        self._may_update.clear()
        origin = finished.origin
        record = step.record
        record.epoch = origin.epoch
        record.metrics |= {**origin.metrics, "training/staleness": float(step.base_step - origin.policy_version)}
        return KeptRollouts(step, finished.groups, finished.answered, finished.greedy_scores)

    async def look_ahead(self, step: StepContext, config: Config, end: RunEnd, first_draw: int) -> None:
        """Samples the rollouts of the step after `step`, with the weights from before the update of `step`.

        `first_draw` is the number of the first batch of prompts of `step`. If the next step cannot be filled, the
        `draw` of that step raises the error.
        """
        first_draw += self._num_draws
        if end.has_step(step.number + 1, first_draw):
            await self._sample_next(step, config, first_draw)
        self._may_update.set()
        updated_s = [span.finished_s for span in step.record.spans if span.name in ("update_actor", "publish")]
        # 0 without an update, and where the clocks of two machines differ by more than the wait.
        step.record.timings_s["wait_rollouts"] = max(0.0, unix_s() - max(updated_s, default=inf))

    async def before_update(self) -> None:
        """Waits until `look_ahead` needs the models of the running step no more."""
        await self._may_update.wait()

    async def _sample_next(self, step: StepContext, config: Config, first_draw: int) -> None:
        """Samples and scores the rollouts of the next step, and keeps them; its work is recorded in the running step.

        The actor's group samples before its update. A rollout group samples beside it: a few of its tokens are first
        compared with the actor's log-probs, after which the actor may update while the group goes on. If a trained
        group hosts the reward model, the updates wait until all is scored.
        """
        number = step.number + 1
        workers = step.workers
        record = StepRecord(number, unix_s())
        following = replace(step, config=config.at_step(number), record=record, num_ahead=1)
        finish = partial(self._finish_next, following, first_draw)
        if workers.rollout is None:
            await finish()
        else:
            probe = Probe(step, self.prompts.table)
            rows = await probe.sample()

            async def compare() -> None:
                await probe.compare(rows)
                if workers.reward_model not in workers.trained:  # else its scores come before its group's update
                    self._may_update.set()

            await run_calls(config.run.schedule, compare, finish)
        step.record.add_work_of(record.spans, record.timings_s)

    async def _finish_next(self, following: StepContext, first_draw: int) -> None:
        try:
            self._keep(await self.finish(following, first_draw))
        except TooFewSampleGroups as error:
            self._ran_out = error

    def check_next(self) -> None:
        """Raises the TooFewSampleGroups error of the last `look_ahead`, if it could not fill the next step."""
        if self._ran_out is not None:
            raise self._ran_out

    def _keep(self, finished: FinishedRollouts | None) -> None:
        self._next = finished
        self.file_of_next = finished.serialise if finished else None


def step_rollouts(config: Config, prompts: PromptSource, stored: bytes | None) -> StepRollouts:
    """Makes the object that makes the rollouts of each step, by `rollout.staleness` and `rollout.max_step_tokens`.

    `stored` is the checkpoint's file with rollouts that no step has learned from yet, or None.

    Raises:
        ConfigError: the file cannot be used.
    """
    if not config.rollout.has_older_weights or config.evaluation.val_only:
        return StepRollouts(prompts)
    table = prompts.table
    if config.rollout.max_step_tokens is not None:
        none = UnlearnedPrompts.none(table, config.rollout.n)
        return PartialRollouts(prompts, UnlearnedPrompts.parse(stored, table) if stored else none)
    return RolloutsAhead(prompts, FinishedRollouts.parse(stored, table) if stored else None)
