"""The PPO dataflow, and nothing else.

    prompts -> generate -> { old/ref log-probs | values | scores } -> advantages -> { update actor | update critic }

With `rollout.stream_groups` values and scores of the responses that end first are computed while others are still
generated; the log-probs need the actor, which generates.
The schedules (controller/schedule.py) change only what may run at the same time, never what is computed.
"""

import asyncio
from dataclasses import dataclass

from controller.data.prompts import PromptBatch, PromptSource
from controller.ppo.experience import Experience, assemble_experience
from controller.rollout.evaluation import Evaluator
from controller.rollout.log_prob_check import LogProbCheck
from controller.rollout.scoring import Scorer
from controller.run.checkpoint_writer import CheckpointWriter
from controller.run.state import RunState
from controller.schedule import run_calls
from controller.step_calls import StepCalls
from controller.tracking.recorder import Recorder
from controller.workers.concurrency import BackgroundTask
from controller.workers.worker_groups import Workers
from splitppo.config import Config


@dataclass(eq=False)
class Trainer:
    """Drives the workers through the steps of a run, from the state that they were restored to.

    `state` is of the step that is being worked on, or of the last one that was done.
    """

    config: Config
    workers: Workers
    prompts: PromptSource
    scorer: Scorer
    evaluator: Evaluator
    checkpoints: CheckpointWriter
    recorder: Recorder
    state: RunState

    def __post_init__(self) -> None:
        self.schedule = self.config.run.schedule
        self.log_prob_check = LogProbCheck(self.config.rollout, first_step=self.state.step + 1)
        self.critic_update = BackgroundTask(on_done=self.recorder.complete_oldest)
        self.is_stopping = self.config.evaluation.val_only or self.state.has_stagnated(self.config)

    def stop(self) -> None:
        """Lets `fit` return, and save, after the step that is being worked on."""
        self.is_stopping = True

    async def fit(self) -> None:
        """Trains up to the last step; validates and saves on the way."""
        if self.state.step == 0 or self.config.evaluation.val_only:
            await self.evaluate_if_due()
        while not self.is_stopping and self.state.step < self.config.last_step:
            self.state = self.state.at_step(self.state.step + 1)
            await self.train_step(self.prompts.batch_at(self.state.step))
            await self.evaluate_if_due()
            await self.checkpoint_if_due()
            if not self.critic_update.is_pending:
                self.recorder.complete_oldest()
            if self.schedule == "serial":
                await self.checkpoints.join()
        await self.join_critic()
        await self.checkpoints.join()

    async def train_step(self, prompts: PromptBatch) -> None:
        """One PPO step."""
        record = self.recorder.begin(self.state.step, epoch=self.prompts.epoch_of(self.state.step))
        calls = StepCalls(self.config, self.workers, self.scorer, self.log_prob_check, prompts, record)
        experience = await self.collect(calls)
        await self.update(calls, experience)
        self.recorder.close(record)
        sampler = self.prompts.state_after(prompts, experience.scores)
        self.state = self.state.after(experience, self.config, record.step_s, sampler)

    async def collect(self, calls: StepCalls) -> Experience:
        """Everything that the updates learn from; each call starts as soon as its input has arrived."""
        rollouts, old, ref, values, scored = await run_calls(
            self.schedule,
            calls.generate,  # hands on the responses that have ended, part by part
            calls.old_log_probs,  # actor, where the update cannot have them itself
            lambda: calls.ref_log_probs(after_update=self.join_critic),  # whichever group hosts the reference
            lambda: calls.values(after_update=self.join_critic),  # critic, once its update of the step before is done
            lambda: calls.scores(after_update=self.join_critic),  # reward processes; whichever hosts the reward model
        )
        record = calls.record
        algorithm = self.config.algorithm_at(record.step)
        with record.timed("adv"), record.span("controller", "adv"):
            record.experience = experience = assemble_experience(
                algorithm,
                rollouts.merge(old).merge(ref).merge(values),
                scored.scores,
                num_samples=self.config.rollout.n,
                kl_coef=self.state.kl_coef,
                components=scored.components(algorithm.gdpo_reward_keys),
                token_scores=scored.token_scores(rollouts["responses"].lengths),
                normalization=self.state.normalization(self.config),
            )
        self.log_prob_check.check(record.step, experience.metrics)
        return experience

    async def update(self, calls: StepCalls, experience: Experience) -> None:
        """Updates both models; under `overlap` the critic's update goes on while the next step generates."""
        # Passes over every token, which nobody has to wait for while the engines work.
        measuring = asyncio.get_running_loop().run_in_executor(None, lambda: calls.record.learning)
        with calls.record.timed("update_actor_critic"):
            if self.schedule == "overlap" and self.workers.critic is not None:
                self.critic_update.start(calls.update_critic(experience))
                await calls.update_actor(experience)
            else:
                await run_calls(
                    self.schedule, lambda: calls.update_actor(experience), lambda: calls.update_critic(experience)
                )
        await measuring

    async def join_critic(self) -> None:
        """Waits for the critic's update of the step before, where it was left to go on, and completes that step."""
        if self.critic_update.is_pending:
            await self.critic_update.join(self.recorder.current.timed("stall_critic"))

    async def abandon(self) -> None:
        """Gives up what runs in the background; the workers finish their commands all the same."""
        await self.checkpoints.abandon()
        await self.critic_update.abandon()

    async def evaluate_if_due(self) -> None:
        """Validates the policy that the step has made."""
        step = self.state.step
        if self.evaluator.is_due(step):
            validation = await self.evaluator.evaluate(step)
            self.recorder.add_validation(step, validation)
            self.state = self.state.validated(step, validation.accuracy).judged(step, validation.metrics, self.config)
            self.is_stopping |= self.state.has_stagnated(self.config)

    async def checkpoint_if_due(self) -> None:
        """Starts a pair checkpoint in the background, which begins when both updates of the step are done."""
        self.checkpoints.check()
        step = self.state.step
        if self.is_stopping or self.checkpoints.is_due(self.state):
            with self.recorder.current.timed("save_checkpoint"):
                await self.checkpoints.begin(self.state, metrics=self.recorder.hold(step))
