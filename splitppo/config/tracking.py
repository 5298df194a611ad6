"""The section `tracking`: what is written down beside metrics.jsonl, and who is told."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from splitppo.config.section import PositiveInt, Section

TrackerName = Literal["tensorboard", "wandb", "mlflow", "swanlab", "trackio"]


def _each_once(names: Sequence[str]) -> Sequence[str]:
    if len({*names}) < len(names):
        raise ValueError(f"expected each tracker once, got {', '.join(names)}")
    return names


class TrackingConfig(Section):
    """What is written down beside metrics.jsonl, and who is told."""

    trackers: Annotated[tuple[TrackerName, ...], AfterValidator(_each_once)] = Field(
        ("tensorboard",), description="besides JSONL; each is fed by a process of its own that never holds up a step"
    )
    project: str = Field("splitppo", description="project (MLflow: experiment) in trackers", min_length=1)
    python: Path | None = Field(None, description="interpreter that has the trackers' packages; null: the controller's")
    flush_timeout_s: float = Field(30.0, ge=0.0, description="seconds that the end of a run waits for trackers")
    sample_freq: int = Field(10, ge=-1, description="steps between samples shown, and sent to trackers; -1: off")
    num_samples: PositiveInt = Field(2, description="samples shown each time")
    dump_rollouts: bool = Field(
        False, description="write every training rollout as JSONL; of validation: evaluation.dump_generations"
    )
