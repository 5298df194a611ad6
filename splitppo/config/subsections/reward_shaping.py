"""The section `reward.shaping`."""

from pydantic import Field, field_validator

from splitppo.config.section import Section


class RewardShapingConfig(Section):
    """Changes to scores in training, in this order: scaled, clipped, less the KL penalty, whitened."""

    scale: float = Field(1.0, gt=0.0, allow_inf_nan=False)
    """what scores are multiplied by"""

    running_scale: bool = False
    """divide them by the standard deviation of the scores of all responses of the run so far"""

    clip_range: tuple[float, float] | None = None
    """[lowest, highest], to which they are clipped then; scores of tokens and of ends each"""

    whiten_rewards: bool = False
    """token rewards, KL penalty included, get a deviation of 1 over the batch and keep their mean"""

    @field_validator("clip_range")
    @classmethod
    def _it_is_a_range(cls, clip_range: tuple[float, float] | None) -> tuple[float, float] | None:
        if clip_range is not None and not clip_range[0] < clip_range[1]:
            raise ValueError("expected the lowest score, then a higher one")
        return clip_range
