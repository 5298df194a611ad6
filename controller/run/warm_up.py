"""Decides from the critic's explained variance when its warm-up ends before `critic.warmup_steps` are done."""

from typing import Self

from pydantic import BaseModel, Field

from splitppo.config.sections.models import WarmUpUntilConfig


class WarmUp(BaseModel, frozen=True, extra="forbid"):
    """Counts the steps of the warm-up in a row whose explained variance was no higher than the best before them."""

    best: float | None = Field(None, description="highest critic/mc_explained_var that counted as a rise")
    num_steps: int = Field(0, ge=0, description="steps in a row since the best one")
    has_ended: bool = Field(False, description="the warm-up is over, whatever later steps say")

    def after(self, until: WarmUpUntilConfig, explained: float | None) -> Self:
        """Counts a step of the warm-up; `explained` is None if the step had no token to learn from, and says nothing.

        The values that `explained` is about were computed before the update of the step.
        """
        if explained is None:
            return self
        if self.best is None or explained > self.best + until.min_delta:
            return self.model_copy(update={"best": explained, "num_steps": 0})
        num_steps = self.num_steps + 1
        return self.model_copy(update={"num_steps": num_steps, "has_ended": num_steps >= until.patience})
