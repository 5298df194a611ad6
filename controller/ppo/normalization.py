"""What of a step is scaled, and by which statistics of the run: the scores, and the values that the critic learns."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Self

from controller.ppo.masked_stats import Floats
from controller.ppo.running_moments import Moments, RunningMoments
from controller.ppo.value_normalization import denormalize, value_std
from splitppo.batch import Batch
from splitppo.config.reward_shaping import RewardShapingConfig


@dataclass(frozen=True)
class Normalization:
    """Sections of the configuration, and the statistics, which become those of the step as it goes on."""

    shaping: RewardShapingConfig = field(default_factory=RewardShapingConfig)
    normalize_values: bool = False  # critic.normalize_values
    running: RunningMoments = field(default_factory=RunningMoments)

    def including_scores(self, scores_B: Floats) -> Self:
        """With the scores of the step, as they were given."""
        scores = self.running.scores.including(scores_B) if self.shaping.running_scale else Moments()
        return replace(self, running=RunningMoments(scores=scores, returns=self.running.returns))

    def including_returns(self, returns_N: Floats) -> Self:
        """With the returns that the critic learns in the step."""
        returns = self.running.returns.including(returns_N) if self.normalize_values else Moments()
        return replace(self, running=RunningMoments(scores=self.running.scores, returns=returns))

    def denormalized(self, rollouts: Batch) -> Batch:
        """The same with the critic's values, if there are any, on the scale of the rewards."""
        if "values" not in rollouts or not self.running.returns.count:
            return rollouts
        values = denormalize(rollouts["values"], self.running.returns)
        return rollouts.merge(Batch(rollouts.num_rows, {"values": values}))

    @property
    def metrics(self) -> Mapping[str, float]:
        """The statistics that are in use."""
        scores, returns = self.running.scores, self.running.returns
        metrics = {"reward/running_std": scores.std} if scores.count else {}
        if returns.count:
            metrics |= {"critic/value_norm/mean": returns.mean, "critic/value_norm/std": value_std(returns)}
        return metrics


# Scores and values as they are.
NO_NORMALIZATION = Normalization()
