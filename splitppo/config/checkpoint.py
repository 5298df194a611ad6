"""The section `checkpoint`."""

from pydantic import Field

from splitppo.config.evaluation import MetricMode, ValidationMetric
from splitppo.config.section import PositiveInt, Section


class CheckpointConfig(Section):
    """Pair checkpoints."""

    save_freq: int = Field(-1, ge=-1, description="steps between checkpoints; -1: none before the last step")
    save_last: bool = Field(True, description="a checkpoint after the last step; Ctrl-C saves in any case")
    keep: PositiveInt = Field(3, description="newest checkpoints kept")
    best_metric: ValidationMetric | None = Field(
        None,
        description="of validation, e.g. val/accuracy: a step that is better than all before it is saved, and kept"
        " beside the newest until a better one is; checkpoints/best leads to it. null: off",
    )
    best_mode: MetricMode = Field("max", description="which values are better: the larger or the smaller ones")
    save_hf_model: bool = Field(False, description="also write Hugging Face folders")
