"""The section `checkpoint`."""

from pydantic import Field

from splitppo.config.section import PositiveInt, Section
from splitppo.config.sections.evaluation import MetricMode, ValidationMetric


class CheckpointConfig(Section):
    """Pair checkpoints."""

    save_freq: int = Field(-1, ge=-1)
    """steps between checkpoints; -1: none before the last step"""

    save_last: bool = True
    """a checkpoint after the last step; Ctrl-C saves in any case"""

    keep: PositiveInt | None = 3
    """newest checkpoints kept; null: all"""

    best_metric: ValidationMetric | None = None
    """of validation, e.g. val/accuracy: a step that is better than all before it is saved, and kept beside the newest
    until a better one is; checkpoints/best leads to it. null: off"""

    best_mode: MetricMode = "max"
    """which values are better: the larger or the smaller ones"""

    save_hf_model: bool = False
    """also write Hugging Face folders"""
