"""The configuration section `run`: folder, seed, length and schedule of a training run."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from splitppo.config.section import Key, PositiveInt, Section

Schedule = Literal["serial", "gather", "overlap"]


class RunConfig(Section):
    """The settings of a training run as a whole: its folder, its length, its schedule."""

    dir: Path
    """The folder of the run. It lies on storage that the controller and all ranks share."""

    name: str = Field("splitppo", min_length=1)
    """The name of the run in trackers and logs."""

    seed: Annotated[int, Key(may_change=False, shapes_worker=True)] = Field(1, ge=0, lt=2**31)
    """The seed for the order of prompts, for sampling, and for heads that a model does not have yet."""

    total_steps: PositiveInt | None = None
    """The number of PPO steps of the whole run. null: total_epochs alone sets the length. One of the two must be
    given."""

    total_epochs: PositiveInt | None = None
    """The number of passes over the training prompts. null: total_steps alone sets the length. If both are given, the
    run ends at whichever comes first."""

    stop_after_step: PositiveInt | None = None
    """The step after which this start of the run stops early. null: it goes on to the end. The schedules of the run
    stay those of its full length."""

    schedule: Schedule = "gather"
    """The calls that may run at the same time. serial: one call at a time. gather: independent calls overlap, and the
    step ends when both updates are done. overlap: the update of the critic may also overlap with the next
    generation."""

    resume: str = Field("auto", min_length=1)
    """The step at which the run continues. auto: the newest complete checkpoint in `dir`, or step 0 if there is none.
    disable: step 0; refused if `dir` holds an earlier run. Any other value is the path of a folder global_step_N, also
    of another run."""

    def _check_keys(self) -> None:
        if self.total_steps is None and self.total_epochs is None:
            raise ValueError("expected total_steps, total_epochs, or both")
