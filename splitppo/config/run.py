"""The section `run`."""

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from splitppo.config.section import PositiveInt, Section

Schedule = Literal["serial", "gather", "overlap"]


class RunConfig(Section):
    """The run as a whole."""

    dir: Path = Field(description="run folder; storage that the controller and all ranks share")
    name: str = Field("splitppo", description="name in trackers and logs", min_length=1)
    seed: int = Field(1, ge=0, lt=2**31, description="seeds prompt order, sampling and new model heads")
    total_steps: PositiveInt | None = Field(None, description="PPO steps of the whole run; null: total_epochs says it")
    total_epochs: PositiveInt | None = Field(
        None, description="passes over the training prompts; with total_steps too, whichever ends first"
    )
    stop_after_step: PositiveInt | None = Field(None, description="stop early after this step; changes no schedule")
    schedule: Schedule = Field("gather", description="serial | gather | overlap: what may run at the same time")
    resume: str = Field("auto", description="auto | disable | path of a global_step_N folder", min_length=1)

    @model_validator(mode="after")
    def _an_end_is_given(self) -> Self:
        if self.total_steps is None and self.total_epochs is None:
            raise ValueError("expected total_steps, total_epochs, or both")
        return self
