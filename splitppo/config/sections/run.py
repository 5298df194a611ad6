"""The section `run`."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from splitppo.config.section import Key, PositiveInt, Section

Schedule = Literal["serial", "gather", "overlap"]


class RunConfig(Section):
    """The run as a whole."""

    dir: Path
    """run folder; storage that the controller and all ranks share"""

    name: str = Field("splitppo", min_length=1)
    """name in trackers and logs"""

    seed: Annotated[int, Key(may_change=False, shapes_worker=True)] = Field(1, ge=0, lt=2**31)
    """seeds prompt order, sampling and new model heads"""

    total_steps: PositiveInt | None = None
    """PPO steps of the whole run; null: total_epochs says it"""

    total_epochs: PositiveInt | None = None
    """passes over the training prompts; with total_steps too, whichever ends first"""

    stop_after_step: PositiveInt | None = None
    """stop early after this step; changes no schedule"""

    schedule: Schedule = "gather"
    """serial | gather | overlap: what may run at the same time"""

    resume: str = Field("auto", min_length=1)
    """auto | disable | path of a global_step_N folder"""

    def _check_keys(self) -> None:
        if self.total_steps is None and self.total_epochs is None:
            raise ValueError("expected total_steps, total_epochs, or both")
