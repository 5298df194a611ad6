"""The controller's own state (step, coefficients, totals, validation), which every checkpoint stores."""

import logging
from collections.abc import Mapping
from typing import Any, Self

from pydantic import BaseModel, Field

from controller.ppo.distillation import next_coef, with_coef
from controller.ppo.entropy import entropy_coeff_in_force, next_entropy_coeff
from controller.ppo.kl import next_kl_coef
from controller.ppo.normalization import Normalization, RunningMoments
from controller.run.warm_up import WarmUp
from controller.tracking.step_record import StepRecord
from controller.validation.improvement import Stagnation, best_after
from controller.validation.result import ValidationResult
from splitppo.config import Config
from splitppo.run_folder.metrics import MC_EXPLAINED_VARIANCE
from splitppo.run_folder.summary import Accuracy, Best

log = logging.getLogger(__name__)


class RunState(BaseModel, frozen=True, extra="forbid"):
    """The controller's state after a step of the run. It is immutable: each step makes a new state."""

    step: int = Field(0, ge=0, description="last step that was done; while a step runs, that step")
    kl_coef: float = Field(description="coefficient of the KL in the reward; the adaptive controller moves it")
    teacher_coef: float | None = Field(
        None, description="weight of the teacher's signal that its adaptive control has come to; null: teacher.coef"
    )
    entropy_coeff: float | None = Field(
        None, description="weight that adaptive entropy control has come to; null: actor.entropy_coeff"
    )
    entropy: float | None = Field(None, description="of the policy in the actor's latest update, nats per token")
    validation_before: Accuracy | None = Field(None, description="accuracy of the initial policy (step 0)")
    validation_after: Accuracy | None = Field(None, description="latest accuracy, at step validated_step")
    validated_step: int = Field(-1, description="step of validation_after")
    validation_sampling: Mapping[str, float] | None = Field(
        None, description="keys of `evaluation` by which validation responses were drawn; null: an older version"
    )
    train_s: float = Field(0.0, description="seconds in steps, without validation and checkpoints")
    tokens: int = Field(0, description="prompt and response tokens trained")
    refills: int = Field(0, ge=0, description="batches of prompts drawn beyond one per step, by dynamic sampling")
    running: RunningMoments = Field(RunningMoments(), description="statistics of normalised scores and returns")
    sampler: Mapping[str, Any] | None = Field(None, description="position of a user's sampler; null for other prompts")
    warm_up: WarmUp = Field(WarmUp(), description="of the critic, by critic.warmup_until")
    best: Best | None = Field(None, description="best validation by checkpoint.best_metric")
    stagnation: Stagnation | None = Field(None, description="validations without progress, by evaluation.early_stop")

    @classmethod
    def initial(cls, config: Config) -> Self:
        """Returns the state of a run before its first step."""
        return cls(step=0, kl_coef=config.algorithm.kl_coef)

    def config_at_step(self, config: Config) -> Config:
        """Returns the configuration of the running step, with the values of its phase and the adaptive coefficients."""
        config = config.at_step(self.step, is_warm_up=self.is_warm_up(config))
        algorithm = config.algorithm
        actor = config.actor
        teacher = with_coef(config.teacher, self.teacher_coef)
        if algorithm.kl_ctrl == "adaptive":
            algorithm = algorithm.model_copy(update={"kl_coef": self.kl_coef})
        if algorithm.adaptive_entropy.enable:
            coeff = actor.entropy_coeff if self.entropy_coeff is None else self.entropy_coeff
            coeff = entropy_coeff_in_force(algorithm.adaptive_entropy, coeff, self.entropy)
            actor = actor.model_copy(update={"entropy_coeff": coeff})
        return config.model_copy(update={"algorithm": algorithm, "actor": actor, "teacher": teacher})

    def after(self, record: StepRecord, config: Config, num_draws: int, sampler: Mapping[str, Any] | None) -> Self:
        """Returns the state after the updates of a step: new adaptive coefficients, totals and position in the prompts.

        `num_draws` batches of prompts were taken for the step.
        """
        config = config.at_step(self.step)
        experience = record.experience
        entropy = record.metrics.get("actor/entropy")  # None if there was no update, or no token
        entropy_coeff = self.entropy_coeff
        adaptive = config.algorithm.adaptive_entropy
        if adaptive.enable:
            coeff = config.actor.entropy_coeff if entropy_coeff is None else entropy_coeff
            entropy_coeff = next_entropy_coeff(adaptive, coeff, entropy)
        num_samples = experience.batch.num_rows
        teacher_coef = next_coef(config.teacher, self.teacher_coef, experience.metrics, num_samples=num_samples)
        return self.model_copy(
            update={
                "kl_coef": next_kl_coef(config.algorithm, self.kl_coef, experience.kl, num_samples=num_samples),
                "teacher_coef": teacher_coef,
                "entropy_coeff": entropy_coeff,
                "entropy": self.entropy if entropy is None else entropy,
                "train_s": self.train_s + record.step_s,
                "tokens": self.tokens + experience.num_tokens,
                "refills": self.refills + num_draws - 1,
                "running": experience.running,
                "sampler": sampler,
                "warm_up": self._warm_up_after(record, config),
            }
        )

    def is_warm_up(self, config: Config) -> bool:
        """Returns True if the running step updates the critic only."""
        return self.step <= config.num_warmup_steps and not self.warm_up.has_ended

    def _warm_up_after(self, record: StepRecord, config: Config) -> WarmUp:
        """Returns what is known of the critic's warm-up after this step; outside of it nothing changes."""
        until = config.critic.warmup_until
        if until is None or not self.is_warm_up(config):
            return self.warm_up
        warm_up = self.warm_up.after(until, record.learning.get(MC_EXPLAINED_VARIANCE))
        if warm_up.has_ended:
            log.info(
                "the critic's warm-up ends with step %s: no rise over the %s of %.3f in %s steps",
                self.step,
                MC_EXPLAINED_VARIANCE,
                warm_up.best,
                warm_up.num_steps,
            )
        return warm_up

    @property
    def draw(self) -> int:
        """The number of the first batch of prompts of the running step; between steps, of the last batch taken."""
        return self.step + self.refills

    def normalization(self, config: Config) -> Normalization:
        """Returns the normalization of scores and returns in the next step, from the statistics of earlier steps."""
        normalize_values = config.uses_critic and config.critic.normalize_values
        return Normalization(config.reward.shaping, normalize_values, self.running)

    def at_step(self, step: int) -> Self:
        """Returns a copy of this state with `step` as the step that runs now."""
        return self.model_copy(update={"step": step})

    def is_sampled_alike(self, config: Config) -> bool:
        """Returns True if the latest validation sampled with the settings of `config`, or its settings are unknown."""
        return self.validation_sampling in (None, _sampling(config))

    def validated(self, step: int, validation: ValidationResult, config: Config) -> Self:
        """Returns the state after a validation of the policy of `step`: new accuracy, best step, and stagnation count.

        The accuracy of step 0 is dropped if `config` now samples responses differently: the two cannot be compared.

        Raises:
            ConfigError: the configuration names a metric that validation does not have.
        """
        before = self.validation_before if self.is_sampled_alike(config) else None
        metric = config.checkpoint.best_metric
        mode = config.checkpoint.best_mode
        metrics = validation.metrics
        return self.model_copy(
            update={
                "validation_before": validation.accuracy if step == 0 else before,
                "validation_after": validation.accuracy,
                "validated_step": step,
                "validation_sampling": _sampling(config),
                "best": best_after(self.best, metric, mode, step, metrics) if metric else None,
                "stagnation": Stagnation.after(self.stagnation, config.evaluation.early_stop, metrics),
            }
        )

    @property
    def best_step(self) -> int | None:
        """The step with the best validation, whose checkpoint is kept; None if there is none."""
        return self.best.step if self.best else None

    def has_stagnated(self, config: Config) -> bool:
        """Returns True if the run must end early, because validation has not improved (`evaluation.early_stop`)."""
        return self.stagnation is not None and self.stagnation.ends(config.evaluation.early_stop)


def _sampling(config: Config) -> Mapping[str, float]:
    """Returns the values of the configuration keys that decide how a validation samples responses."""
    return config.evaluation.model_dump(include={"n", "temperature", "top_p", "top_k"})
