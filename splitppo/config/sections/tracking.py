"""The section `tracking`: records of a run beside metrics.jsonl."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from splitppo.config.section import PositiveInt, Section, expected

TrackerName = Literal["tensorboard", "wandb", "mlflow", "swanlab", "trackio"]


class TrackingConfig(Section):
    """Records of a run beside metrics.jsonl: trackers, samples, rollouts."""

    trackers: Annotated[
        tuple[TrackerName, ...],
        AfterValidator(expected("each tracker once", lambda names: len({*names}) == len(names))),
    ] = ("tensorboard",)
    """besides JSONL; each is fed by a process of its own that never holds up a step"""

    project: str = Field("splitppo", min_length=1)
    """project (MLflow: experiment) in trackers"""

    python: Path | None = None
    """interpreter that has the trackers' packages; null: the controller's"""

    flush_timeout_s: float = Field(30.0, ge=0.0)
    """seconds that the end of a run waits for trackers"""

    sample_freq: int = Field(10, ge=-1)
    """steps between samples shown, and sent to trackers; -1: off"""

    num_samples: PositiveInt = 2
    """samples shown each time"""

    dump_rollouts: bool = False
    """write every training rollout as JSONL; of validation: evaluation.dump_generations"""
