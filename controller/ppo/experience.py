"""Computes what the models learn from in one step: rewards, advantages and returns, from rollouts and scores.

B responses (prompts x samples, ordered by prompt, then sample), N tokens of responses, one row after the other.
Formulas work on padded arrays. Only a block of rows is padded at a time; the arrays that a step keeps are ragged.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from controller.ppo.advantages.estimate import discounted_sums, estimate
from controller.ppo.distillation import NO_TEACHER, add_signal, distillation_metrics, teacher_signal
from controller.ppo.masked_stats import Float32s, Float64s
from controller.ppo.normalization import NO_NORMALIZATION, Normalization, RunningMoments, running_metrics
from controller.ppo.rollout_correction import correct_rollouts
from controller.ppo.scores import Scores
from controller.ppo.token_rewards import shape_scores, shaped_parts, subtract_kl, token_rewards, whiten_rewards
from splitppo.batch import Batch, Column
from splitppo.config import AlgorithmConfig
from splitppo.config.sections.teacher import TeacherConfig
from splitppo.config.subsections.reward_shaping import RewardShapingConfig

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
        counted: bool, aligned with responses: the tokens that the policy sampled.
        kl: mean KL to the reference, nats; None without KL in the reward.
        metrics: the metrics of the KL in the reward, of distillation, of normalisation, and of the difference between
            the log-probs of the rollout backend and the trainer.
        running: statistics of the run, this step included; if they have returns, the critic learns normalised returns.
        gamma, turn_gamma: the discount factors of the step.
    """

    batch: Batch
    scores: Float32s
    rewards: Column
    learned: Column
    counted: Column
    kl: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    running: RunningMoments = field(default_factory=RunningMoments)
    gamma: float = 1.0
    turn_gamma: float | None = None

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
        columns = self._present("returns", "response_mask")
        moments = self.running.returns
        if not moments.count:
            return columns
        scaled = {name: moments.normalize(self.batch[name], self.learned) for name in ("values", "returns")}
        return columns.merge(Batch(self.batch.num_rows, scaled))

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
    teacher: TeacherConfig = NO_TEACHER,
) -> Experience:
    """Computes what a step learns from: corrects rollouts, places scores, subtracts the KL, estimates advantages.

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
        teacher: the settings of the teachers in this step; if it names any, the rollouts have their log-probs.
    """
    made = _of_rollouts(rollouts, scores)
    made = _without_rejected(made, algorithm)
    made = _without_truncated(made, algorithm, scores)
    made = _without_statistics_of_one(made)
    made = _by_the_policy_that_sampled(made, algorithm)
    made = replace(made, batch=normalization.denormalized(made.batch))
    made = _compared_with_teachers(made, teacher, scores)
    made = _rewarded(made, scores, normalization)
    made = _less_kl(made, algorithm)
    made = _taught_by_rewards(made, teacher)
    made = _whitened(made, normalization.shaping)
    made = _estimated(made, algorithm, scores, num_samples, _baseline(greedy_scores_P, made, normalization.shaping))
    made = _taught_by_advantages(made, teacher)
    made = _with_statistics_of_returns(made, normalization)
    return _with_columns_of_losses(made, algorithm)


def monte_carlo_returns(experience: Experience) -> Float64s:
    """Computes the discounted sum of the rewards from each learned token on, [N], on the scale of values and returns.

    The rewards are those that the estimator uses; values have no part in it, whatever lambda is.
    """
    return discounted_sums(
        experience.rewards,
        response_mask=experience.counted,
        learned=experience.learned,
        gamma=experience.gamma,
        turn_gamma=experience.turn_gamma,
    )


def _of_rollouts(rollouts: Batch, scores: Scores) -> Experience:
    """Returns an experience without rewards, in which all response tokens that count are learned.

    All tokens count if the rollouts have no column `response_mask`.
    """
    lengths = rollouts["responses"].lengths
    counts_N = np.ones(len(rollouts["responses"].values), np.bool_)
    if "response_mask" in rollouts:
        counts_N = rollouts["response_mask"].values.astype(np.bool_)
    counted = Column(counts_N, lengths)
    no_rewards = Column(np.zeros(len(counts_N), np.float32), lengths)
    return Experience(rollouts, scores.scores, no_rewards, learned=counted, counted=counted)


def _without_rejected(made: Experience, algorithm: AlgorithmConfig) -> Experience:
    """Weights and rejects tokens by the ratio of trainer to rollout backend; formulas are in `rollout_correction`."""
    learned, weights, metrics = correct_rollouts(algorithm.rollout_correction, made.batch, made.counted)
    made = replace(made, learned=learned, metrics={**made.metrics, **metrics})
    return made if weights is None else _with_columns(made, rollout_is_weights=weights)


def _without_truncated(made: Experience, algorithm: AlgorithmConfig, scores: Scores) -> Experience:
    """Leaves out truncated responses with `mask_truncated_completions` (overlong filtering: DAPO, Yu et al., 2025)."""
    if not algorithm.mask_truncated_completions:
        return made
    is_truncated_N = np.repeat(scores.is_truncated, made.learned.lengths)
    return replace(made, learned=Column(made.learned.values & ~is_truncated_N, made.learned.lengths))


def _without_statistics_of_one(made: Experience) -> Experience:
    """Leaves out a single token, because a single token has no statistics: nothing is learned in this step."""
    num_learned = made.learned.values.sum()
    if num_learned >= 2:
        return made
    log.warning(
        "%d of %d response tokens are left to learn from: nothing is learned in this step",
        num_learned,
        len(made.learned.values),
    )
    return replace(made, learned=Column(np.zeros_like(made.learned.values), made.learned.lengths))


def _by_the_policy_that_sampled(made: Experience, algorithm: AlgorithmConfig) -> Experience:
    """Replaces, with bypass_mode, the old log-probs of the rollouts by those of the rollout backend.

    This is done also in steps that compute both log-probs for a check: a check must not change what is learned.
    """
    if not (algorithm.rollout_correction.bypasses and "rollout_log_probs" in made.batch):
        return made
    return _with_columns(made, old_log_probs=made.batch["rollout_log_probs"])


def _compared_with_teachers(made: Experience, teacher: TeacherConfig, scores: Scores) -> Experience:
    """Adds the metrics of distillation, see `distillation_metrics`; nothing without teachers."""
    if not teacher.folders:
        return made
    metrics = distillation_metrics(teacher, made.batch, made.counted, scores.data_sources)
    return replace(made, metrics={**made.metrics, **metrics})


def _rewarded(made: Experience, scores: Scores, normalization: Normalization) -> Experience:
    """Shapes the scores and places them on tokens; formulas are in `shape_scores` and `token_rewards`.

    Only learned tokens can have a score, or all that count if their response is rejected as a whole.
    """
    moments = normalization.scores_including(scores.scores)
    ends_B, token_scores = shaped_parts(normalization.shaping, scores, std=moments.std)
    is_rejected_N = np.repeat(made.learned.sums() == 0, made.learned.lengths)
    may_have_N = made.learned.values | (made.counted.values & is_rejected_N)
    rewards = token_rewards(ends_B, token_scores, Column(may_have_N, made.learned.lengths))
    return replace(made, rewards=rewards, running=RunningMoments(scores=moments))


def _less_kl(made: Experience, algorithm: AlgorithmConfig) -> Experience:
    """Subtracts, with `use_kl_in_reward`, the KL to the reference from the rewards (Ouyang et al., 2022, eq. 2)."""
    if not algorithm.use_kl_in_reward:
        return made
    kl = subtract_kl(algorithm, made.batch, made.rewards, made.counted)
    metrics = {"actor/reward_kl_penalty": kl, "actor/reward_kl_penalty_coeff": algorithm.kl_coef}
    return replace(made, kl=kl, metrics={**made.metrics, **metrics})


def _taught_by_rewards(made: Experience, teacher: TeacherConfig) -> Experience:
    """Adds the teachers' signal to the rewards of all tokens that count, with `teacher.signal` reward."""
    if not teacher.folders or teacher.signal != "reward":
        return made
    signal_N = teacher_signal(teacher, made.batch, made.counted)
    return replace(made, rewards=add_signal(made.rewards, signal_N, made.counted))


def _whitened(made: Experience, shaping: RewardShapingConfig) -> Experience:
    """Whitens the rewards with `reward.shaping.whiten_rewards`; the formula is in `whiten_rewards`."""
    if not (shaping.whiten_rewards and made.learned.values.any()):
        return made
    return replace(made, rewards=whiten_rewards(made.rewards, made.counted))


def _baseline(greedy_scores_P: Float32s | None, made: Experience, shaping: RewardShapingConfig) -> Float32s | None:
    """Returns the greedy scores on the scale of the rewards (ReMax: Li et al., 2024), [P]; None if there are none."""
    if greedy_scores_P is None:
        return None
    return shape_scores(shaping, greedy_scores_P, std=made.running.scores.std).astype(np.float32)


def _estimated(
    made: Experience, algorithm: AlgorithmConfig, scores: Scores, num_samples: int, baseline_P: Float32s | None
) -> Experience:
    """Adds advantages and returns by the configured estimator; controller/ppo/advantages has the formulas."""
    advantages, returns = estimate(
        algorithm,
        made.batch,
        made.rewards,
        response_mask=made.counted,
        learned=made.learned,
        num_samples=num_samples,
        greedy_scores_B=None if baseline_P is None else np.repeat(baseline_P, num_samples),
        components_KB=scores.components(algorithm.gdpo_reward_keys),
    )
    made = replace(made, gamma=algorithm.gamma, turn_gamma=algorithm.turn_gamma)
    return _with_columns(made, advantages=advantages, returns=returns)


def _taught_by_advantages(made: Experience, teacher: TeacherConfig) -> Experience:
    """Adds the teachers' signal to the advantages of the tokens that are learned, with `teacher.signal` advantage."""
    if not teacher.folders or teacher.signal != "advantage":
        return made
    signal_N = teacher_signal(teacher, made.batch, made.counted)
    return _with_columns(made, advantages=add_signal(made.batch["advantages"], signal_N, made.learned))


def _with_statistics_of_returns(made: Experience, normalization: Normalization) -> Experience:
    """Adds the returns of learned tokens to the statistics of the run, if values are normalised; see `Moments`."""
    returns_N = made.batch["returns"].values[made.learned.values]
    running = RunningMoments(scores=made.running.scores, returns=normalization.returns_including(returns_N))
    return replace(made, running=running, metrics={**made.metrics, **running_metrics(running)})


def _with_columns_of_losses(made: Experience, algorithm: AlgorithmConfig) -> Experience:
    """Adds the column `response_mask` for both losses, which marks the learned tokens, if any token may be left out."""
    correction = algorithm.rollout_correction
    rejects = correction.is_active and bool(correction.rejections)
    may_leave_out = rejects or algorithm.mask_truncated_completions or "response_mask" in made.batch
    if not may_leave_out and made.learned.values.all():
        return made
    return _with_columns(made, response_mask=Column(made.learned.values.astype(np.uint8), made.learned.lengths))


def _with_columns(made: Experience, **columns: Column) -> Experience:
    """Returns the experience with columns added to its batch, or replaced there."""
    return replace(made, batch=made.batch.merge(Batch(made.batch.num_rows, columns)))
