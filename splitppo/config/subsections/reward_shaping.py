"""The configuration section `reward.shaping`: changes to the scores of responses in training."""

from pydantic import Field

from splitppo.config.section import Range, Section


class RewardShapingConfig(Section):
    """Changes to the scores in training, in this order: scaled, clipped, reduced by the KL penalty, whitened."""

    scale: float = Field(1.0, gt=0.0, allow_inf_nan=False)
    """The number that scores are multiplied by."""

    running_scale: bool = False
    """If true, scores are divided by the standard deviation of the scores of all responses of the run so far."""

    clip_range: Range | None = None
    """The lowest and the highest score, to which scores are clipped after that: the score of each token, and the rest
    on the last token, each by itself. null: not clipped."""

    whiten_rewards: bool = False
    """If true, the rewards of tokens, KL penalty included, are scaled to a standard deviation of 1 over the batch.
    Their mean stays."""
