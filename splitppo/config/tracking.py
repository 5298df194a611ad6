"""The section `tracking`: what is written down beside metrics.jsonl."""

from typing import Literal

from pydantic import Field

from splitppo.config.section import PositiveInt, Section


class TrackingConfig(Section):
    """What is written down beside metrics.jsonl."""

    trackers: tuple[Literal["tensorboard"], ...] = Field(("tensorboard",), description="besides JSONL")
    sample_freq: int = Field(10, ge=-1, description="steps between printed sample generations; -1: off")
    num_samples: PositiveInt = Field(2, description="generations printed each time")
    dump_rollouts: bool = Field(
        False, description="write every training rollout as JSONL; of validation: evaluation.dump_generations"
    )
