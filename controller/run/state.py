"""What the controller itself must not lose: stored with every pair checkpoint, restored with it."""

from typing import Self

from pydantic import BaseModel, ConfigDict, Field

from controller.ppo.experience import Experience
from controller.ppo.kl import next_kl_coef
from controller.rollout.results import Accuracy
from splitppo.config import Config


class RunState(BaseModel):
    """State of the run after a step; immutable, each step makes a new one."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    step: int = Field(0, ge=0, description="last step that was done; while a step runs, that step")
    kl_coef: float = Field(description="coefficient of the KL in the reward; the adaptive controller moves it")
    validation_before: Accuracy | None = Field(None, description="of the initial policy (step 0)")
    validation_after: Accuracy | None = Field(None, description="the latest, at step validated_step")
    validated_step: int = Field(-1, description="step of validation_after")
    train_s: float = Field(0.0, description="seconds in steps, without validation and checkpoints")
    tokens: int = Field(0, description="prompt and response tokens trained")

    @classmethod
    def initial(cls, config: Config) -> Self:
        """State before the first step."""
        return cls(step=0, kl_coef=config.algorithm.kl_coef)

    def after(self, experience: Experience, config: Config, step_s: float) -> Self:
        """State after the update on `experience`: the KL controller moves, totals grow."""
        num_samples = experience.batch.num_rows
        return self.model_copy(
            update={
                "kl_coef": next_kl_coef(config.algorithm, self.kl_coef, experience.kl, num_samples=num_samples),
                "train_s": self.train_s + step_s,
                "tokens": self.tokens + experience.num_tokens,
            }
        )

    def at_step(self, step: int) -> Self:
        """The same state while `step` is being worked on."""
        return self.model_copy(update={"step": step})

    def validated(self, step: int, accuracy: Accuracy) -> Self:
        """State after a validation of the policy of `step`."""
        before = accuracy if step == 0 else self.validation_before
        return self.model_copy(
            update={"validation_before": before, "validation_after": accuracy, "validated_step": step}
        )
