"""Defines the context of one PPO step: the step's configuration, and the objects that all calls of the step use."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from controller.data.privileged_prompts import PrivilegedPrompts
from controller.sampling.stream import SamplingGroups
from controller.scoring.scorer import Scorer
from controller.step.log_prob_check import LogProbCheck
from controller.tracking.step_record import StepRecord
from controller.workers.worker_groups import Workers
from splitppo.config import Config


@dataclass(frozen=True, eq=False)
class StepContext:
    """Bundles the configuration and the objects that functions of one PPO step need, so that they take one argument.

    Rollouts of the next step may be sampled while this step trains (`rollout.staleness` 1). They have a context of
    their own, with the weights of this step.

    Attributes:
        config: the configuration of this step, with the values of its phase.
        workers: the clients of the worker groups.
        sampling: the groups that sample, and what the policy talks with.
        scorer: scores responses by the reward functions.
        log_prob_check: decides whether the log-probs of this step are compared.
        record: metrics, times and spans of this step.
        after_critic_update: waits for the critic's update of the step before. Until then the critic's group computes
            nothing for this step.
        privileged: makes the texts that the value model alone reads; None if it reads none.
        is_warm_up: the critic is warmed up: this step's updates leave the policy as it is.
        num_ahead: the updates that still come before the update of this step: 0, or 1 for rollouts of the next step.
    """

    config: Config
    workers: Workers
    sampling: SamplingGroups
    scorer: Scorer
    log_prob_check: LogProbCheck
    record: StepRecord
    after_critic_update: Callable[[], Awaitable[None]]
    privileged: PrivilegedPrompts | None = None
    is_warm_up: bool = False
    num_ahead: int = 0

    @property
    def number(self) -> int:
        """The number of this PPO step, from 1."""
        return self.record.step

    @property
    def base_step(self) -> int:
        """The number of the step whose weights the workers have while they compute for this step."""
        return self.number - 1 - self.num_ahead
