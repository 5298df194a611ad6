"""The rollouts of a step: still to be sampled, or, with dynamic sampling, those that were kept of many.

Dynamic sampling draws and answers prompts until the step is full of groups whose samples differ. Every generation is
scored before the next one is drawn, which is for what it lacks. What is kept depends on the weights; which prompts and
seeds come next does not, given how many were drawn before.
"""

from controller.data.prompts import PromptSource
from controller.rollout.kept_groups import KeptGroups, KeptRollouts
from controller.rollout.scoring import Scorer
from controller.rollout.stream import Rollouts, RolloutStream
from controller.rollout_calls import AfterUpdate, RolloutCalls
from controller.schedule import run_calls
from controller.tracking.step_record import StepRecord
from controller.workers.worker_groups import Workers
from splitppo.config import Config
from splitppo.v1.batch_pb2 import SLOT_KIND_EXPERIENCE, Slot


class StepPrompts:
    """Draws the prompts of each step.

    Raises:
        GroupsRanOut: too few groups of samples differ.
        ConfigError: the scorer does not give what groups are compared by.
    """

    def __init__(
        self, config: Config, workers: Workers, prompts: PromptSource, scorer: Scorer, after_update: AfterUpdate
    ) -> None:
        """`after_update` waits for the critic's update of the step before, where its group scores candidates."""
        self._config = config
        self._workers = workers
        self._prompts = prompts
        self._scorer = scorer
        self._after_update = after_update
        epochs = config.run.total_epochs
        self._last_draw = None if epochs is None else prompts.num_steps(epochs)
        self._generations_per_epoch = prompts.num_steps(1)

    def are_used_up(self, draw: int) -> bool:
        """Whether those of `run.total_epochs` are, once that many batches were drawn; a step is filled all the same."""
        return self._last_draw is not None and draw >= self._last_draw

    async def rollouts(self, record: StepRecord, first_draw: int) -> Rollouts:
        """The responses that a step learns from, the first batch of whose prompts has the number `first_draw`."""
        config = self._config
        if config.algorithm.filter_groups.enable:
            with record.timed("dynamic_sampling"):
                rollouts: Rollouts = await self._kept(record, first_draw)
        else:
            prompts = self._prompts.batch_at(first_draw)
            rollouts = RolloutStream.of_step(config, self._workers.actor, prompts, record.step)
        record.epoch = self._prompts.epoch_of(first_draw + rollouts.num_draws - 1)
        return rollouts

    async def _kept(self, record: StepRecord, first_draw: int) -> KeptRollouts:
        """`data.train_batch_size` groups whose samples differ, in the order in which their prompts were drawn."""
        config, step, actor = self._config, record.step, self._workers.actor
        filters, num_prompts = config.algorithm.filter_groups, config.data.train_batch_size
        groups = KeptGroups(filters, num_prompts, step, generations_per_epoch=self._generations_per_epoch)
        while not groups.is_full:
            groups.check()
            prompts = self._prompts.batch_at(first_draw + groups.num_generations)
            candidates = RolloutStream.of_candidates(
                config, actor, prompts, step, generation=groups.num_generations + 1, earlier=groups.drawn_rows
            )
            calls = RolloutCalls(
                config,
                self._workers,
                self._scorer,
                record,
                candidates,
                self._after_update,
                asks_model=filters.compares_scores,
                num_examine=0 if groups.num_generations else config.reward.num_examine,
            )
            rollouts, scored = await run_calls(config.run.schedule, calls.generate, calls.scores)
            groups.add(prompts, rollouts, scored)
        record.metrics |= groups.metrics()
        return groups.rollouts(actor, Slot(kind=SLOT_KIND_EXPERIENCE, step=step))
