"""From rollouts, log-probs, values and scores to what the updates need: rewards, advantages, returns.

B responses (prompts x samples, ordered by prompt, then sample), N tokens of responses, one row after the other.
Formulas work on padded arrays; only a block of rows is padded at a time, and what a step keeps is ragged.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from controller.ppo.advantages.estimate import estimate
from controller.ppo.corrected_rollouts import CorrectedRollouts, correct_rollouts
from controller.ppo.masked_stats import Float32s, Mask
from controller.ppo.normalization import NO_NORMALIZATION, Normalization
from controller.ppo.reward_shaping import PlacedScores, shape_scores, whiten_rewards
from controller.ppo.running_moments import RunningMoments
from controller.ppo.scores import Scores
from controller.ppo.token_rewards import subtract_kl, token_rewards
from controller.ppo.value_normalization import normalize
from splitppo.batch import Batch, Column
from splitppo.config import AlgorithmConfig

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Experience:
    """What one step learns from.

    Attributes:
        batch: prompts, responses, what the services computed for them, advantages, returns; response_mask where
            tokens may be left out, rollout_is_weights where they are weighted.
        scores: [B], as they were given.
        rewards: shaped, KL penalty included; aligned with responses, 0 where a token does not count.
        learned: bool, of all response tokens those that both models learn from: the others are masked or rejected.
        kl: mean KL to the reference, nats; None without KL in the reward.
        metrics: of the KL in the reward, of normalisation, and of how the rollout backend's log-probs compare with the
            trainer's.
        running: statistics of the run so far, this step included; with those of returns, the critic learns normalised
            ones.
    """

    batch: Batch
    scores: Float32s
    rewards: Column
    learned: Column
    kl: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    running: RunningMoments = field(default_factory=RunningMoments)

    @property
    def num_tokens(self) -> int:
        """Prompt and response tokens."""
        return len(self.batch["prompts"].values) + len(self.batch["responses"].values)

    def actor_columns(
        self, *, lacks_reference: bool = False, lacks_old: bool = False, draws_tokens: bool = False
    ) -> Batch:
        """What the actor's update needs beside what it has; it may lack the reference's or the old log-probs."""
        others = {"ref_log_probs": lacks_reference, "old_log_probs": lacks_old, "seeds": draws_tokens}
        lacking = (name for name, lacks in others.items() if lacks)
        return self._present("advantages", "response_mask", "rollout_is_weights", *lacking)

    @property
    def critic_columns(self) -> Batch:
        """What the critic's update needs beside what the critic has; normalised, its values have another scale then."""
        if not (moments := self.running.returns).count:
            return self._present("returns", "response_mask")
        scaled = {name: normalize(self.batch[name], self.learned, moments) for name in ("values", "returns")}
        return self._present("response_mask").merge(Batch(self.batch.num_rows, scaled))

    def _present(self, *names: str) -> Batch:
        return self.batch.select([name for name in names if name in self.batch])


def assemble_experience(
    algorithm: AlgorithmConfig,
    rollouts: Batch,
    scores: Scores,
    *,
    num_samples: int,
    normalization: Normalization = NO_NORMALIZATION,
) -> Experience:
    """Corrects rollouts, puts scores on tokens, subtracts the KL penalty, estimates advantages and returns.

    A rejected token gets no advantage and no return, and the estimators bridge it. A response keeps its score as long
    as one token is left, on the last of those; one that is rejected as a whole still counts in its group's baseline.
    With mask_truncated_completions so it is with those that were cut off.

    `rollouts` come with whatever the services computed for them; the `num_samples` of one prompt are neighbours.
    `algorithm` is what holds in this step, `kl_coef` included.
    `normalization` has the statistics of the steps before: on their scale the values come.
    """
    mask = _counting(rollouts)
    corrected = correct_rollouts(algorithm.rollout_correction, rollouts, mask)
    learned = _learned(algorithm, corrected.kept, mask, scores.truncated)
    rollouts = normalization.denormalized(_with_policy_that_sampled(algorithm, rollouts))

    normalization = normalization.including_scores(scores.responses)
    placed = shape_scores(normalization, PlacedScores.split(scores.responses, scores.tokens))
    rewards = token_rewards(placed, _kept_or_all(learned, mask))
    kl = subtract_kl(algorithm, rollouts, rewards, mask) if algorithm.use_kl_in_reward else None
    rewards = whiten_rewards(normalization.shaping, rewards, mask)

    advantages, returns = estimate(
        algorithm,
        rollouts,
        rewards,
        scored=mask,
        learned=learned,
        num_samples=num_samples,
        greedy_scores_B=_baseline(normalization, scores.greedy, num_samples),
        components_KB=scores.components,
    )
    normalization = normalization.including_returns(returns.values[learned.values])

    columns = {"advantages": advantages, "returns": returns, **_of_losses(algorithm, corrected, learned)}
    batch = rollouts.merge(Batch(rollouts.num_rows, columns))
    metrics = {**corrected.metrics, **normalization.metrics}
    if kl is not None:
        metrics |= {"actor/reward_kl_penalty": kl, "actor/reward_kl_penalty_coeff": algorithm.kl_coef}
    return Experience(batch, scores.responses, rewards, learned, kl, metrics, normalization.running)


def _counting(rollouts: Batch) -> Column:
    """Bool, of all response tokens those that count."""
    lengths = rollouts["responses"].lengths
    if "response_mask" in rollouts:
        return Column(rollouts["response_mask"].values.astype(np.bool_), lengths)
    return Column(np.ones(len(rollouts["responses"].values), np.bool_), lengths)


def _learned(algorithm: AlgorithmConfig, kept: Column, mask: Column, truncated_B: Mask | None) -> Column:
    """What was kept, without the responses that are left out because they were cut off."""
    kept_N = kept.values
    if algorithm.mask_truncated_completions and truncated_B is not None:
        kept_N = kept_N & ~np.repeat(truncated_B, kept.lengths)
    return Column(_enough_to_learn(kept_N, mask.values), kept.lengths)


def _enough_to_learn(kept_N: Mask, mask_N: Mask) -> Mask:
    """What was kept, or nothing if a single token is left, which no statistic can be made of."""
    kept, total = kept_N.sum(), mask_N.sum()
    if kept >= 2 or total < 2:
        return kept_N
    log.warning("%d of %d response tokens are left to learn from: nothing is learned in this step", kept, total)
    return np.zeros_like(kept_N)


def _with_policy_that_sampled(algorithm: AlgorithmConfig, rollouts: Batch) -> Batch:
    """With bypass_mode the rollout backend's log-probs are the old ones.

    In checked steps too, where both are known: whether a step is checked must not change what is learned.
    """
    if not (algorithm.rollout_correction.bypasses and "rollout_log_probs" in rollouts):
        return rollouts
    return rollouts.merge(Batch(rollouts.num_rows, {"old_log_probs": rollouts["rollout_log_probs"]}))


def _kept_or_all(learned: Column, mask: Column) -> Column:
    """What is learned from; of a response that is rejected as a whole, all that counts."""
    is_rejected_B = learned.sums() == 0
    return Column(learned.values | (mask.values & np.repeat(is_rejected_B, mask.lengths)), mask.lengths)


def _baseline(normalization: Normalization, greedy_scores: Float32s | None, num_samples: int) -> Float32s | None:
    """[B], of each response the greedy score of its prompt, on the scale of the rewards that it is subtracted from."""
    if greedy_scores is None:
        return None
    return np.repeat(shape_scores(normalization, PlacedScores(greedy_scores)).of_ends, num_samples).astype(np.float32)


def _of_losses(algorithm: AlgorithmConfig, corrected: CorrectedRollouts, learned: Column) -> dict[str, Column]:
    """What leaves tokens out of the losses, where any may be, and what weighs them, where anything does."""
    columns = {}
    if algorithm.rollout_correction.rejections or algorithm.mask_truncated_completions:
        columns["response_mask"] = Column(learned.values.astype(np.uint8), learned.lengths)
    if corrected.weights is not None:
        columns["rollout_is_weights"] = corrected.weights
    return columns
