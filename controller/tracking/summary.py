"""The end of a run in numbers: `summary.json`, written on every exit but SIGKILL."""

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from controller.rollout.improvement import Best
from controller.rollout.results import Accuracy
from splitppo.atomic_write import write_atomically

ExitReason = Literal["completed", "interrupted", "failed", "bad_input"]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Validation(_Part):
    """Held-out accuracy of the initial policy (step 0, also on resume) and of the last one; null where not measured."""

    before: Accuracy | None = None
    after: Accuracy | None = None


class Overlap(_Part):
    """How well the two pools worked at the same time, mean over steps."""

    efficiency: float = Field(description="share of the shorter update that was hidden behind the longer one")
    bubble_actor: float = Field(description="share of step time in which the actor pool was idle")
    bubble_critic: float = Field(description="share of step time in which the critic pool was idle")


class WeightsDigests(_Part):
    """sha256 over each role's weights; null where there is no such role or it could not be asked."""

    actor: str | None = None
    critic: str | None = None


class Summary(_Part):
    """What `summary.json` holds."""

    global_step: int = Field(ge=0, description="last step that both roles committed")
    validation: Validation = Field(default_factory=Validation)
    wall_s: float = Field(ge=0.0, description="seconds, start to exit of this process")
    train_s: float = Field(ge=0.0, description="seconds in steps, without validation and checkpoints")
    tokens: int = Field(ge=0, description="prompt and response tokens trained on")
    overlap: Overlap | None = Field(None, description="null where no step ran with both roles")
    weights_sha256: WeightsDigests = Field(default_factory=WeightsDigests)
    exit_reason: ExitReason
    stopped_early: bool = Field(False, description="by evaluation.early_stop")
    best: Best | None = Field(
        None, description="the best validation, whose checkpoint is kept; null without best_metric"
    )

    def write(self, path: Path) -> None:
        """Writes the summary atomically."""
        write_atomically(path, self.model_dump_json(indent=2) + "\n")
