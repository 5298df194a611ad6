"""Computes what the models learn from in one step: rewards, advantages and returns, from rollouts and scores.

B responses (prompts x samples, ordered by prompt, then sample), N tokens of responses, one row after the other.
Formulas work on padded arrays. Only a block of rows is padded at a time; the arrays that a step keeps are ragged.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from controller.ppo.advantages.estimate import estimate
from controller.ppo.distillation import add_signal, distillation_metrics, teacher_signal
from controller.ppo.masked_stats import Float32s, Mask
from controller.ppo.normalization import NO_NORMALIZATION, Normalization, RunningMoments, running_metrics
from controller.ppo.rollout_correction import correct_rollouts
from controller.ppo.scores import Scores
from controller.ppo.token_rewards import shape_scores, shaped_parts, subtract_kl, token_rewards, whiten_rewards
from splitppo.batch import Batch, Column
from splitppo.config import AlgorithmConfig
from splitppo.config.sections.teacher import TeacherConfig

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Experience:
    """The batch that actor and critic learn from in one step, and statistics of this batch.

    Attributes:
        batch: prompts, responses, the columns that the services computed, advantages, returns; response_mask if tokens
            may be left out, rollout_is_weights if tokens are weighted.
        scores: [B], the scores before shaping.
        rewards: shaped, with KL penalty and a teacher's signal; aligned with responses, 0 for tokens that do not count.
        learned: bool, aligned with responses: the tokens that both models learn from. The others are masked or
            rejected.
        kl: mean KL to the reference, nats; None without KL in the reward.
        metrics: the metrics of the KL in the reward, of distillation, of normalisation, and of the difference between
            the log-probs of the rollout backend and the trainer.
        running: statistics of the run, this step included; if they have returns, the critic learns normalised returns.
        counted: bool, aligned with responses: the tokens that the policy sampled; None if they are those of `learned`.
    """

    batch: Batch
    scores: Float32s
    rewards: Column
    learned: Column
    kl: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    running: RunningMoments = field(default_factory=RunningMoments)
    counted: Column | None = None

    @property
    def num_tokens(self) -> int:
        """The number of prompt and response tokens in the batch."""
        return len(self.batch["prompts"].values) + len(self.batch["responses"].values)

    def actor_columns(self, *, lacks_reference: bool = False, lacks_old: bool = False) -> Batch:
        """Selects the columns to send for the actor's update, and adds the log-probs that the actor's group lacks."""
        others = {"ref_log_probs": lacks_reference, "old_log_probs": lacks_old}
        lacking = (name for name, lacks in others.items() if lacks)
        return self._present("advantages", "response_mask", "rollout_is_weights", *lacking)

    @property
    def critic_columns(self) -> Batch:
        """The columns to send for the critic's update; with normalisation also the values, on the new scale."""
        if not (moments := self.running.returns).count:
            return self._present("returns", "response_mask")
        scaled = {name: moments.normalize(self.batch[name], self.learned) for name in ("values", "returns")}
        return self._present("response_mask").merge(Batch(self.batch.num_rows, scaled))

    def _present(self, *names: str) -> Batch:
        return self.batch.select([name for name in names if name in self.batch])


def assemble_experience(
    algorithm: AlgorithmConfig,
    rollouts: Batch,
    scores: Scores,
    *,
    num_samples: int,
    greedy_scores_P: Float32s | None = None,
    normalization: Normalization = NO_NORMALIZATION,
    teacher: TeacherConfig | None = None,
) -> Experience:
    """Computes what a step learns from: corrects rollouts, places scores, subtracts the KL, estimates advantages.

    The signal of a teacher is added to rewards or to advantages, as `teacher.signal` says.

    A rejected token gets no advantage and no return, and the estimators bridge it. A response keeps its score on its
    last token that is left. A response that is rejected as a whole still counts in its group's baseline. With
    `mask_truncated_completions`, truncated responses are treated like rejected ones.

    Args:
        algorithm: the configuration in this step, `kl_coef` included.
        rollouts: prompts, responses and all columns that the services computed.
        scores: the scores of all rollouts.
        num_samples: the number of responses per prompt; responses to one prompt are neighbours.
        greedy_scores_P: the score of a greedy response to each prompt, if it is the baseline (ReMax).
        normalization: the normalisation with the statistics of the steps before; the values are on this scale.
        teacher: the settings of the teachers in this step, if the rollouts have log-probs of teachers.
    """
    response_mask = _response_mask(rollouts)
    not_rejected, weights, metrics = correct_rollouts(algorithm.rollout_correction, rollouts, response_mask)
    learned = _learned(algorithm, not_rejected, scores.is_truncated)
    rollouts = normalization.denormalized(_with_policy_that_sampled(algorithm, rollouts))
    if teacher is not None:
        metrics = {**metrics, **distillation_metrics(teacher, rollouts, response_mask, scores.data_sources)}
        signal_N = teacher_signal(teacher, rollouts, response_mask)

    shaping = normalization.shaping
    score_moments = normalization.scores_including(scores.scores)
    ends_B, token_scores = shaped_parts(shaping, scores, std=score_moments.std)
    rewards = token_rewards(ends_B, token_scores, _rewarded(learned, response_mask))
    kl = subtract_kl(algorithm, rollouts, rewards, response_mask) if algorithm.use_kl_in_reward else None
    if teacher is not None and teacher.signal == "reward":
        rewards = add_signal(rewards, signal_N, response_mask)
    if shaping.whiten_rewards and learned.values.any():
        rewards = whiten_rewards(rewards, response_mask)

    if greedy_scores_P is not None:  # they must be on the scale of the rewards
        greedy_scores_P = shape_scores(shaping, greedy_scores_P, std=score_moments.std).astype(np.float32)
    advantages, returns = estimate(
        algorithm,
        rollouts,
        rewards,
        response_mask=response_mask,
        learned=learned,
        num_samples=num_samples,
        greedy_scores_B=None if greedy_scores_P is None else np.repeat(greedy_scores_P, num_samples),
        components_KB=scores.components(algorithm.gdpo_reward_keys),
    )
    if teacher is not None and teacher.signal == "advantage":
        advantages = add_signal(advantages, signal_N, learned)
    return_moments = normalization.returns_including(returns.values[learned.values])
    running = RunningMoments(scores=score_moments, returns=return_moments)

    columns = {"advantages": advantages, "returns": returns, **_of_losses(algorithm, rollouts, weights, learned)}
    batch = rollouts.merge(Batch(rollouts.num_rows, columns))
    metrics = {**metrics, **running_metrics(running)}
    if kl is not None:
        metrics |= {"actor/reward_kl_penalty": kl, "actor/reward_kl_penalty_coeff": algorithm.kl_coef}
    return Experience(batch, scores.scores, rewards, learned, kl, metrics, running, response_mask)


def _response_mask(rollouts: Batch) -> Column:
    """Returns a bool mask of the response tokens that count; all tokens if there is no column `response_mask`."""
    lengths = rollouts["responses"].lengths
    if "response_mask" in rollouts:
        return Column(rollouts["response_mask"].values.astype(np.bool_), lengths)
    return Column(np.ones(len(rollouts["responses"].values), np.bool_), lengths)


def _learned(algorithm: AlgorithmConfig, not_rejected: Column, is_truncated_B: Mask) -> Column:
    """Returns a mask of the tokens to learn from: not rejected, and not in truncated responses if these are masked.

    The mask is empty if it would mark a single token, because a single token has no statistics.
    """
    learned_N = not_rejected.values
    lengths = not_rejected.lengths
    if algorithm.mask_truncated_completions:
        learned_N = learned_N & ~np.repeat(is_truncated_B, lengths)
    num_learned = learned_N.sum()
    total = len(learned_N)
    if num_learned < 2:
        log.warning(
            "%d of %d response tokens are left to learn from: nothing is learned in this step", num_learned, total
        )
        learned_N = np.zeros_like(learned_N)
    return Column(learned_N, lengths)


def _with_policy_that_sampled(algorithm: AlgorithmConfig, rollouts: Batch) -> Batch:
    """Replaces, with bypass_mode, the old log-probs of the rollouts by those of the rollout backend.

    This is done also in steps that compute both log-probs for a check: a check must not change what is learned.
    """
    if not (algorithm.rollout_correction.bypasses and "rollout_log_probs" in rollouts):
        return rollouts
    return rollouts.merge(Batch(rollouts.num_rows, {"old_log_probs": rollouts["rollout_log_probs"]}))


def _rewarded(learned: Column, response_mask: Column) -> Column:
    """Returns a mask of the tokens that may have a score: `learned`, or all that count if the response is rejected."""
    is_rejected_B = learned.sums() == 0
    return Column(learned.values | (response_mask.values & np.repeat(is_rejected_B, learned.lengths)), learned.lengths)


def _of_losses(
    algorithm: AlgorithmConfig, rollouts: Batch, weights: Column | None, learned: Column
) -> dict[str, Column]:
    """Returns the columns to send for the losses: which tokens are left out, and the weights of tokens, if needed.

    The column `response_mask` on the wire marks the tokens of `learned`.
    """
    columns = dict[str, Column]()
    correction = algorithm.rollout_correction
    rejects = correction.is_active and correction.rejections
    if rejects or algorithm.mask_truncated_completions or "response_mask" in rollouts or not learned.values.all():
        columns["response_mask"] = Column(learned.values.astype(np.uint8), learned.lengths)
    if weights is not None:
        columns["rollout_is_weights"] = weights
    return columns
