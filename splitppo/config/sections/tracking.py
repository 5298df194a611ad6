"""The configuration section `tracking`: what a run records beside metrics.jsonl: trackers, samples, rollouts."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from splitppo.config.section import PositiveInt, Section

TrackerName = Literal["tensorboard", "wandb", "mlflow", "swanlab", "trackio"]


class RolloutsConfig(Section):
    """The settings of the record of responses in rollouts/train and rollouts/val, parquet files for each step."""

    enable: bool = True
    """If true, a thread of the controller records every step and validation. It changes nothing of what is learned."""

    tokens_per_step: int = Field(20_000, ge=0)
    """The number of response tokens per step that are recorded one by one. Half of them are drawn at random, half are
    those of extreme responses. Of all other responses the record has only numbers."""

    max_gb: float = Field(1.0, gt=0.0)
    """The size of the record, in 10^9 bytes, from which on older steps lose their tokens, every second one first.
    Images of prompts take a quarter of it at most; later ones are not kept."""


class TrackingConfig(Section):
    """The settings of what a run records beside metrics.jsonl: trackers, samples, rollouts."""

    trackers: tuple[TrackerName, ...] = ("tensorboard",)
    """The trackers that receive the metrics, in addition to metrics.jsonl. Each is fed by a process of its own, which
    never delays a step."""

    project: str = Field("splitppo", min_length=1)
    """The project of the run in the trackers; with MLflow the experiment."""

    python: Path | None = None
    """The Python interpreter whose environment holds the packages of the trackers. null: the interpreter of the
    controller."""

    flush_timeout_s: float = Field(30.0, ge=0.0)
    """The number of seconds that the end of a run waits for the trackers."""

    sample_freq: int = Field(10, ge=-1)
    """The number of steps from one display of samples to the next. The samples are also sent to the trackers. -1:
    never."""

    num_samples: PositiveInt = 2
    """The number of samples that are shown each time."""

    dump_rollouts: bool = False
    """If true, all training responses are written as JSONL in the run folder. For validation see
    evaluation.dump_generations."""

    report: bool = True
    """If true, the end of a run draws its curves in report.png, which takes a second or two."""

    rollouts: RolloutsConfig = RolloutsConfig()
    """The record of responses, with the numbers of their tokens."""

    def num_shown(self, step: int) -> int:
        """Returns how many responses of a step display and trackers show; `step` is 0 for those of a validation."""
        return self.num_samples if self.sample_freq > 0 and step % self.sample_freq == 0 else 0

    def _check_keys(self) -> None:
        if len({*self.trackers}) < len(self.trackers):
            raise ValueError(f"trackers: expected each tracker once, got {[*self.trackers]}")
