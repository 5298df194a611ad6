"""The PPO dataflow, and nothing else.

    prompts -> generate -> { old/ref log-probs | values | scores } -> advantages -> { update actor | update critic }

With `rollout.stream_groups` values and scores begin with the first group of prompts whose responses have all ended,
while others are still generated; the log-probs need the actor, which generates.
The schedules (controller/schedule.py) change only what may run at the same time, never what is computed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from controller.checkpointing import CheckpointWriter
from controller.clients import ActorClient, CommandReply, CriticClient
from controller.data import PromptBatch, PromptDataset
from controller.evaluation import Evaluator
from controller.experience import Experience, assemble_experience
from controller.recorder import Recorder
from controller.recovery import replay_if_clean
from controller.rollout_check import RolloutCheck
from controller.rollout_groups import RolloutGroup, cut_into_groups, whole_slot
from controller.rollouts import RolloutMaker
from controller.run_state import RunState
from controller.schedule import run_calls
from controller.scoring import Scorer, Verdict, join_verdicts
from controller.step_record import StepRecord
from splitppo.batch import Batch, concatenate
from splitppo.config import Config
from splitppo.v1.batch_pb2 import Slot


@dataclass(frozen=True)
class Services:
    """The groups that the trainer drives; estimators without values have no critic."""

    actor: ActorClient
    critic: CriticClient | None


@dataclass(frozen=True)
class Observers:
    """What accompanies the training: validation, checkpoints, records."""

    evaluator: Evaluator
    checkpoints: CheckpointWriter
    recorder: Recorder


class Trainer:
    """Drives the services through the steps of a run, from the state that they were restored to."""

    def __init__(
        self,
        config: Config,
        services: Services,
        prompts: PromptDataset,
        scorer: Scorer,
        observers: Observers,
        state: RunState,
    ) -> None:
        self.config = config
        self.actor, self.critic = services.actor, services.critic
        self.prompts = prompts
        self.scorer = scorer
        self.evaluator = observers.evaluator
        self.checkpoints = observers.checkpoints
        self.recorder = observers.recorder
        self.state = state
        self.schedule = config.run.schedule
        self.rollout_check = RolloutCheck(config.rollout, first_step=state.step + 1)
        self.rollouts = RolloutMaker(config, services.actor, self.rollout_check)
        self._critic_update: asyncio.Task[None] | None = None
        self._is_stopping = False

    @property
    def step(self) -> int:
        """The step that is being worked on, or the last one that was done."""
        return self.state.step

    @property
    def last_step(self) -> int:
        """Where this process stops; `stop_after_step` changes no schedule."""
        run = self.config.run
        return min(run.total_steps, run.stop_after_step or run.total_steps)

    @property
    def is_done(self) -> bool:
        """True when no step follows the one that is being worked on."""
        return self._is_stopping or self.step >= self.last_step

    def stop(self) -> None:
        """Lets `fit` return, and save, after the step that is being worked on."""
        self._is_stopping = True

    async def fit(self) -> None:
        """Trains up to the last step; validates and saves on the way."""
        if self.step == 0:
            await self.evaluate_if_due()
        while not self.is_done:
            self.state = self.state.at_step(self.step + 1)
            experience = await self.collect(self.prompts.batch_at(self.step))
            await self.update(experience)
            await self.evaluate_if_due()
            await self.checkpoint_if_due()
            self.complete_step()
            if self.schedule == "serial":
                await self.checkpoints.join()
        await self.join()

    async def collect(self, prompts: PromptBatch) -> Experience:
        """Generates, and gathers what the advantages need, at the same time where the schedule allows it."""
        record = self.recorder.begin(self.step)
        groups = cut_into_groups(prompts, self.config.rollout.stream_groups, self.step)

        async def rollouts_with_log_probs() -> Batch:
            rollouts = await self.rollouts.generate(prompts, groups, record)
            return rollouts.merge(await self.rollouts.compute_log_probs(rollouts, record))

        rollouts, values, verdict = await run_calls(
            self.schedule,
            rollouts_with_log_probs,
            lambda: self.compute_values(groups, record),
            lambda: self.score(groups, record),
        )
        with record.timed("adv"), record.span("controller", "adv"):
            experience = assemble_experience(
                self.config.algorithm,
                rollouts.merge(values),
                verdict.result.scores,
                num_samples=self.config.rollout.n,
                kl_coef=self.state.kl_coef,
            )
        self.rollout_check.check(self.step, experience.metrics)
        return experience

    async def update(self, experience: Experience) -> None:
        """Updates both models; under `overlap` the critic's update goes on while the next step generates."""
        record = self.recorder.current
        record.experience = experience
        with record.timed("update_actor_critic"):
            if self.schedule == "overlap" and self.critic is not None:
                self._critic_update = asyncio.create_task(self.update_critic(experience, record))
                await self.update_actor(experience, record)
            else:
                await run_calls(
                    self.schedule,
                    lambda: self.update_actor(experience, record),
                    lambda: self.update_critic(experience, record),
                )
        self.recorder.close(record)
        self.state = self.state.after(experience, self.config, record.step_s)

    async def join_critic(self) -> None:
        """Waits for the critic's update of the step before, where one is still running, and completes that step.

        Whoever waits at the same time hears of a failure; the step is completed once.
        """
        update = self._critic_update
        if update is None:
            return
        with self.recorder.current.timed("stall_critic"):
            await asyncio.wait([update])
        is_first, self._critic_update = update is self._critic_update, None
        update.result()
        if is_first:
            self.recorder.complete_oldest()

    async def join(self) -> None:
        """Waits for what runs in the background: the critic's update, the checkpoint that is being written."""
        await self.join_critic()
        await self.checkpoints.join()

    async def abandon(self) -> None:
        """Gives up what runs in the background; the services finish their commands all the same."""
        await self.checkpoints.abandon()
        if self._critic_update is not None:
            update, self._critic_update = self._critic_update, None
            update.cancel()
            await asyncio.gather(update, return_exceptions=True)

    def complete_step(self) -> None:
        """Writes the step's metrics once both updates are done; under `overlap` that is in the next step."""
        if self._critic_update is None:
            self.recorder.complete_oldest()

    # The calls of a step, in the order of the dataflow.

    async def compute_values(self, groups: Sequence[RolloutGroup], record: StepRecord) -> Batch:
        """Values of the states before each response token; here the critic's previous update is needed."""
        values: list[Batch] = []
        for group in groups:
            rollouts = await group.rollouts()
            if self.critic is None:
                values.append(Batch(rollouts.num_rows, {}))
                continue
            await self.critic.put_batch(group.slot, rollouts)
            await self.join_critic()
            with record.timed("values"):
                reply = await self.critic.compute_values(group.slot, base_step=self.step - 1)
                values.append(await self.critic.get_batch(group.slot, ["values"]))
            record.add_reply("critic", "values", reply)
        return concatenate(values)

    async def score(self, groups: Sequence[RolloutGroup], record: StepRecord) -> Verdict:
        """Scores of the responses, from the reward workers."""
        verdicts: list[Verdict] = []
        for group in groups:
            rollouts = await group.rollouts()
            with record.timed("reward"), record.span("reward", "score"):
                verdict = await self.scorer.score(
                    group.prompts,
                    rollouts,
                    num_samples=self.config.rollout.n,
                    num_examine=0 if verdicts else self.config.reward.num_examine,
                )
            verdicts.append(verdict)
        record.verdict = join_verdicts(verdicts)
        return record.verdict

    async def update_actor(self, experience: Experience, record: StepRecord) -> None:
        """One PPO update of the policy; in the critic's warm-up only the step advances."""
        warming_up = self.critic is not None and self.step <= self.config.critic.warmup_steps
        actor, slot, base_step = self.actor, self._slot, self.step - 1

        async def update() -> CommandReply:
            if not warming_up:
                await actor.put_batch(slot, experience.actor_columns)
            return await actor.update(slot, advance_only=warming_up, base_step=base_step)

        with record.timed("update_actor"):
            reply = await replay_if_clean(self.actor, base_step, update)
        record.add_reply("actor", "update_actor", reply)

    async def update_critic(self, experience: Experience, record: StepRecord) -> None:
        """One update of the value model."""
        if self.critic is None:
            return
        critic, slot, base_step = self.critic, self._slot, self.step - 1

        async def update() -> CommandReply:
            await critic.put_batch(slot, experience.critic_columns)
            return await critic.update(slot, base_step=base_step)

        with record.timed("update_critic"):
            reply = await replay_if_clean(critic, base_step, update)
        record.add_reply("critic", "update_critic", reply)

    # What happens between steps.

    async def evaluate_if_due(self) -> None:
        """Validates before the run, every `evaluation.test_freq` steps and after the last step."""
        evaluation = self.config.evaluation
        if self.step == 0:
            due = evaluation.val_before_train
        else:
            on_schedule = evaluation.test_freq > 0 and self.step % evaluation.test_freq == 0
            due = self.step == self.last_step or on_schedule
        if due and self.evaluator.has_prompts:
            validation = await self.evaluator.evaluate(self.step)
            self.recorder.add_validation(self.step, validation)
            self.state = self.state.validated(self.step, validation.accuracy)

    async def checkpoint_if_due(self) -> None:
        """Starts a pair checkpoint in the background, on schedule or at the end; it begins when the step is done."""
        self.checkpoints.check()
        checkpoint = self.config.checkpoint
        on_schedule = checkpoint.save_freq > 0 and self.step % checkpoint.save_freq == 0
        is_last = checkpoint.save_last and self.step == self.last_step
        if on_schedule or is_last or self._is_stopping:
            with self.recorder.current.timed("save_checkpoint"):
                await self.checkpoints.begin(self.state, metrics=self.recorder.hold(self.step))

    @property
    def _slot(self) -> Slot:
        return whole_slot(self.step)
