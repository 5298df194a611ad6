"""Defines the content of `summary.json`, a run's results in numbers, written whenever a run ends except by SIGKILL."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, Self

from pydantic import BaseModel, Field, ValidationError

from splitppo.atomic_write import write_atomically
from splitppo.plain_file import read_plain

ExitReason = Literal["completed", "interrupted", "failed", "bad_input"]


class _Part(BaseModel, frozen=True, extra="forbid", allow_inf_nan=False):
    """A part of summary.json."""


class Accuracy(_Part):
    """The accuracies of one validation, overall and per data source, each in [0, 1]."""

    overall: float = Field(description="mean over all validation responses")
    by_source: dict[str, float] = Field(default_factory=dict, description="mean per data source")


class Best(BaseModel, frozen=True, extra="forbid"):
    """The step with the best validation among the steps that have a checkpoint, and the metric's value at that step."""

    metric: str
    mode: Literal["max", "min"] = Field(description="which values are better")
    step: int = Field(ge=1)
    value: float = Field(description="value of the metric at that step")


class Validation(_Part):
    """Held-out accuracy of the initial policy (step 0) and of the last policy; null if it was not measured.

    The accuracy of the initial policy is null, too, if its responses were sampled in another way than the last ones.
    """

    before: Accuracy | None = None
    after: Accuracy | None = None


class Overlap(_Part):
    """How much the work of actor and critic pool overlapped in time, mean over all steps of the run."""

    efficiency: float = Field(description="share of the shorter update that was hidden behind the longer one")
    bubble_actor: float = Field(description="share of step time in which the actor pool was idle")
    bubble_critic: float = Field(description="share of step time in which the critic's devices were idle")
    bubble_rollout: float | None = Field(
        None, description="share of step time in which a rollout group on devices of its own was idle"
    )

    @classmethod
    def over(cls, lines: Sequence[Mapping[str, Any]]) -> Self | None:
        """Averages overlap/... over the lines of metrics.jsonl in which both roles were updated; None without one."""
        rows = [line for line in lines if line.get("overlap/efficiency") is not None]
        if not rows:
            return None
        measured = {name: [row[key] for row in rows if (key := f"overlap/{name}") in row] for name in cls.model_fields}
        return cls(**{name: fmean(values) for name, values in measured.items() if values})


class WeightsDigests(_Part):
    """The sha256 of the actor's and the critic's weights; null without this role, or if its group did not answer."""

    actor: str | None = None
    critic: str | None = None


class ThisStart(_Part):
    """The part of a run that one controller process has done: its first step and its wall time."""

    resumed_at_step: int = Field(
        ge=0, description="step from which the process went on first, before any recovery; 0: the initial models"
    )
    wall_s: float = Field(ge=0.0, description="seconds, start to exit")


class Summary(_Part):
    """The content of `summary.json`: figures of the whole run over all starts, except those in `this_start`."""

    global_step: int = Field(ge=0, description="last step that both roles committed")
    validation: Validation = Field(default_factory=Validation)
    train_s: float = Field(ge=0.0, description="seconds in steps, without validation and checkpoints")
    tokens: int = Field(ge=0, description="prompt and response tokens trained on")
    overlap: Overlap | None = Field(None, description="null if no step updated both roles")
    this_start: ThisStart
    weights_sha256: WeightsDigests = Field(default_factory=WeightsDigests)
    exit_reason: ExitReason
    why: str | None = Field(None, description="the sentence by which the run failed; null if it did not")
    finished: bool = Field(False, description="true once the run has done its last step")
    stopped_early: bool = Field(False, description="true if evaluation.early_stop has ended the run")
    best: Best | None = Field(
        None, description="the best validation, whose checkpoint is kept; null without best_metric"
    )

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """Parses a summary.json file; returns None if there is no file, or it cannot be read."""
        try:
            return cls.model_validate_json(read_plain(path))
        except (OSError, ValidationError):
            return None

    def write(self, path: Path) -> None:
        """Writes the summary to a file as JSON, atomically."""
        write_atomically(path, self.model_dump_json(indent=2) + "\n")
