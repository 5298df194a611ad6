"""The PPO algorithm as a dataflow of calls, and nothing else.

    prompts -> generate -> { old/ref log-probs | values | scores } -> advantages -> { update actor | update critic }

With `rollout.stream_groups`, values and scores of the responses that end first come while others are generated. With
`rollout.staleness` 1, a step looks ahead. A schedule changes only what may run at the same time, never the results.
"""

from dataclasses import dataclass
from functools import partial

from controller.data.privileged_prompts import PrivilegedPrompts
from controller.ppo.experience import Experience, assemble_experience
from controller.run.checkpoint_writer import CheckpointWriter
from controller.run.end import RunEnd
from controller.run.state import RunState
from controller.sampling.stream import SamplingGroups
from controller.schedule import run_calls
from controller.scoring.scorer import Scorer
from controller.step.calls import StepCalls
from controller.step.context import StepContext
from controller.step.log_prob_check import LogProbCheck
from controller.step.rollouts import StepRollouts
from controller.step.updates import StepUpdates
from controller.tracking.recorder import Recorder
from controller.validation.evaluation import Evaluator
from controller.workers.concurrency import BackgroundTask, gather_calls
from controller.workers.worker_groups import Workers
from splitppo.config import Config


@dataclass(eq=False)
class Trainer:
    """Runs the PPO steps of a run. `state` is that of the running step, or of the last step that was done."""

    config: Config
    workers: Workers
    sampling: SamplingGroups
    rollouts: StepRollouts
    scorer: Scorer
    evaluator: Evaluator
    checkpoints: CheckpointWriter
    recorder: Recorder
    state: RunState
    privileged: PrivilegedPrompts | None = None

    def __post_init__(self) -> None:
        self.schedule = self.config.run.schedule
        self.end = RunEnd.of(self.config, self.rollouts.prompts)
        self.log_prob_check = LogProbCheck(self.config.rollout, first_step=self.state.step + 1)
        self.critic_update = BackgroundTask(timer=lambda: self.recorder.timed("stall_critic"))
        self.sampling.devices.after_critic_update = self.critic_update.wait
        self.is_stopping = self.config.evaluation.val_only or self.state.has_stagnated(self.config)

    @property
    def has_ended(self) -> bool:
        """True if the last step is done, or if dynamic sampling has used up the prompts of `run.total_epochs`."""
        return self.end.is_reached(self.state)

    def stop(self) -> None:
        """Makes `fit` finish the running step, save a checkpoint, and return."""
        self.is_stopping = True

    async def fit(self) -> None:
        """Trains up to the last step of the run; validates and saves checkpoints when they are due."""
        if self.state.step == 0 or self.config.evaluation.val_only:
            await self.evaluate_if_due()
        while not (self.is_stopping or self.has_ended):
            self.state = self.state.at_step(self.state.step + 1)
            await self.train_step()
            await self.evaluate_if_due()
            await self.checkpoint_if_due()
            try:
                if self.is_stopping or self.has_ended:  # no step comes during which the critic could be updated
                    await self.critic_update.wait()
            finally:
                self.critic_update.then(self.recorder.complete_oldest)
            if self.schedule == "serial":
                await self.checkpoints.join()
        await self.join()

    async def join(self) -> None:
        """Waits for the critic's update and the checkpoint of the last step, if they still run."""
        await self.critic_update.join()
        await self.checkpoints.join()

    async def train_step(self) -> None:
        """Makes one PPO step: draws prompts, collects the experience, updates both models, and makes the next state."""
        config = self.state.config_at_step(self.config)
        record = self.recorder.begin(self.state.step)
        step = StepContext(
            config=config,
            workers=self.workers,
            sampling=self.sampling,
            scorer=self.scorer,
            log_prob_check=self.log_prob_check,
            record=record,
            after_critic_update=self.critic_update.join,
            privileged=self.privileged,
            is_warm_up=self.state.is_warm_up(self.config),
        )
        rollouts = await self.rollouts.draw(step, self.state.draw)
        calls = StepCalls(step, rollouts)  # `calls.rollouts` is what `draw` returns
        look_ahead = partial(self.rollouts.look_ahead, step, self.config, self.end, self.state.draw)
        await run_calls(self.schedule, look_ahead, partial(self.learn, calls))
        self.recorder.close(record)
        drawn = calls.rollouts.answered(record.experience.scores)
        self.state = self.state.after(record, self.config, len(drawn), self.rollouts.prompts.state_after(drawn))

    async def collect(self, calls: StepCalls) -> Experience:
        """Makes the experience that both updates learn from. Each call starts as soon as its input has arrived."""
        rollouts, greedy, old, frozen, values, scores = await run_calls(
            self.schedule,
            calls.rollouts.generate,  # hands on the responses that have ended, part by part
            calls.greedy_scores,  # actor and reward processes, where they are the baseline (ReMax)
            calls.old_log_probs,  # actor, where the update cannot have them itself
            calls.frozen_log_probs,  # whichever groups host reference and teachers
            calls.values,  # critic, once its update of the step before is done
            calls.scores,  # reward processes; whichever hosts the reward model
        )
        record = calls.step.record
        algorithm = calls.step.config.algorithm
        with record.timed("adv"), record.span("controller", "adv"):
            record.experience = experience = assemble_experience(
                algorithm,
                rollouts.merge(old).merge(frozen).merge(values),
                scores,
                num_samples=self.config.rollout.n,
                greedy_scores_P=greedy,
                normalization=self.state.normalization(self.config),
                teacher=calls.step.config.teacher,
            )
        self.log_prob_check.check(record.step, experience.metrics)
        return experience

    async def learn(self, calls: StepCalls) -> None:
        """Collects the experience, and updates both models. Under `overlap` the critic's update may end later."""
        experience = await self.collect(calls)
        await self.rollouts.before_update()
        updates = StepUpdates(calls.step, calls.rollouts.slot)
        update_actor = partial(updates.update_actor, experience)
        update_critic = partial(updates.update_critic, experience)
        with calls.step.record.timed("update_actor_critic"):
            if self.schedule == "overlap" and self.workers.critic is not None:
                self.critic_update.start(update_critic)
                await update_actor()
            else:
                await run_calls(self.schedule, update_actor, update_critic)

    async def abandon(self) -> None:
        """Stops waiting for background checkpoints and updates; the workers finish their commands nevertheless."""
        await gather_calls(self.checkpoints.abandon(), self.critic_update.abandon())

    async def evaluate_if_due(self) -> None:
        """Validates the policy of the last step, if a validation is due; records the result."""
        step = self.state.step
        if not self.evaluator.is_due(step, is_last=self.has_ended):
            return
        validation = await self.evaluator.evaluate(step)
        # A second validation of this step, sampled otherwise, must not overwrite the files of the first.
        is_repeated_otherwise = step == self.state.validated_step and not self.state.is_sampled_alike(self.config)
        folder_of_rollouts = "val_only" if is_repeated_otherwise else "val"
        self.recorder.add_validation(step, validation, split=folder_of_rollouts)
        self.state = self.state.validated(step, validation, self.config)
        self.is_stopping |= self.state.has_stagnated(self.config)

    async def checkpoint_if_due(self) -> None:
        """Starts a pair checkpoint in the background, if one is due. It begins after both updates of the step."""
        self.checkpoints.check()
        if self.is_stopping or self.checkpoints.is_due(self.state, is_last=self.has_ended):
            with self.recorder.current.timed("save_checkpoint"):
                metrics = self.recorder.hold(self.state.step)
                rollouts = self.rollouts.file_of_next
                await self.checkpoints.begin(self.state, metrics=metrics, rollouts=rollouts)
