"""The section `reward.shaping`."""

from pydantic import Field

from splitppo.config.section import Range, Section


class RewardShapingConfig(Section):
    """Changes to scores in training, in this order: scaled, clipped, less the KL penalty, whitened."""

    scale: float = Field(1.0, gt=0.0, allow_inf_nan=False)
    """what scores are multiplied by"""

    running_scale: bool = False
    """divide them by the standard deviation of the scores of all responses of the run so far"""

    clip_range: Range | None = None
    """[lowest, highest], to which they are clipped then; scores of tokens and of ends each"""

    whiten_rewards: bool = False
    """token rewards, KL penalty included, get a deviation of 1 over the batch and keep their mean"""
