"""From rollouts, log-probs, values and scores to what the updates need: rewards, advantages, returns.

B responses (prompts x samples, ordered by prompt, then sample), T response tokens, right-padded; N tokens of responses,
one row after the other. Formulas work on padded arrays; only a block of rows is padded at a time, and what a step keeps
is ragged.
"""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from controller.ppo.advantages.registry import compute_advantages, estimator_of, over_batch
from controller.ppo.kl import kl_divergence
from controller.ppo.masked_stats import Float32s, Float64s, Mask
from controller.ppo.normalization import NO_NORMALIZATION, Normalization
from controller.ppo.reward_shaping import PlacedScores, shape_scores, whiten_rewards
from controller.ppo.rollout_correction import correct_rollout
from controller.ppo.rollout_mismatch import Mismatch
from controller.ppo.running_moments import RunningMoments
from controller.ppo.token_rewards import penalise_kl, token_rewards
from controller.ppo.value_normalization import normalize
from splitppo.batch import Batch, Column
from splitppo.config import AlgorithmConfig

log = logging.getLogger(__name__)


# Padded tokens that are worked on at a time. Few, and float64 arrays of them stay in a core's cache; many, and the
# recursion over a response's tokens takes more responses per call.
_MISMATCH_TOKENS, _ADVANTAGE_TOKENS = 1 << 17, 1 << 19


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
    scores_B: Float32s,
    *,
    num_samples: int,
    kl_coef: float,
    truncated_B: Mask | None = None,
    greedy_scores: Float32s | None = None,
    components: Float32s | None = None,
    token_scores: Column | None = None,
    normalization: Normalization = NO_NORMALIZATION,
) -> Experience:
    """Corrects rollouts, puts scores on tokens, subtracts the KL penalty, estimates advantages and returns.

    A rejected token gets no advantage and no return, and the estimators bridge it. A response keeps its score as long
    as one token is left, on the last of those; one that is rejected as a whole still counts in its group's baseline.
    With mask_truncated_completions so it is with those of `truncated_B`, which were cut off ([B]; None: none was).

    `rollouts` come with whatever the services computed for them; the `num_samples` of one prompt are neighbours.
    Where the estimator needs them: `greedy_scores` [P], the score of a greedy response to each prompt, and `components`
    [K, B] of the scores.
    `token_scores`, aligned with responses, are the part of the scores that is placed; the rest belongs to the ends.
    `normalization` has the statistics of the steps before: on their scale the values come.
    """
    lengths = rollouts["responses"].lengths
    mask = Column(np.ones(len(rollouts["responses"].values), np.bool_), lengths)
    if "response_mask" in rollouts:
        mask = Column(rollouts["response_mask"].values.astype(np.bool_), lengths)
    correction = _correct(algorithm, rollouts, mask)
    if algorithm.rollout_correction.bypasses and "rollout_log_probs" in rollouts:
        # In checked steps too, where both are known: whether a step is checked must not change what is learned.
        rollouts = rollouts.merge(Batch(rollouts.num_rows, {"old_log_probs": rollouts["rollout_log_probs"]}))
    learned = _learned(correction.kept, mask, truncated_B if algorithm.mask_truncated_completions else None)
    rollouts, normalization = normalization.denormalized(rollouts), normalization.including_scores(scores_B)
    placed = shape_scores(normalization, PlacedScores.split(scores_B, token_scores))
    rewards, kl_B = token_rewards(placed, _kept_or_all(learned, mask)), np.zeros(rollouts.num_rows)
    if algorithm.use_kl_in_reward:
        kl_B = _penalise_kl(algorithm, rollouts, rewards, mask, kl_coef=kl_coef)
    rewards = whiten_rewards(normalization.shaping, rewards, mask)
    given = (rollouts, rewards, mask, learned, _baseline(normalization, greedy_scores, num_samples), components)
    advantages, returns = _estimate(algorithm, *given, num_samples=num_samples)
    normalization = normalization.including_returns(returns.values[learned.values])
    kl, metrics = None, {**correction.metrics, **normalization.metrics}
    if algorithm.use_kl_in_reward:
        kl = float(kl_B.mean()) if len(kl_B) else 0.0
        metrics |= {"actor/reward_kl_penalty": kl, "actor/reward_kl_penalty_coeff": kl_coef}
    if learned.values.any() or not mask.values.any():
        advantages = Column(over_batch(algorithm, advantages, learned.values, rewards.sums()), lengths)
    columns = {"advantages": advantages, "returns": returns}
    if algorithm.rollout_correction.rejections or algorithm.mask_truncated_completions:
        columns["response_mask"] = Column(learned.values.astype(np.uint8), lengths)
    if correction.weights is not None:
        columns["rollout_is_weights"] = correction.weights
    batch = rollouts.merge(Batch(rollouts.num_rows, columns))
    return Experience(batch, scores_B, rewards, learned, kl, metrics, normalization.running)


def _blocks(lengths: NDArray[np.int32], num_tokens: int, *, num_samples: int = 1) -> Iterator[tuple[int, int]]:
    """(start, stop) of neighbouring rows, at most `num_tokens` when padded; the samples of a prompt never part."""
    num_rows = num_samples * max(1, num_tokens // (num_samples * int(lengths.max(initial=1))))
    return ((start, min(start + num_rows, len(lengths))) for start in range(0, len(lengths), num_rows))


def _estimate(
    algorithm: AlgorithmConfig,
    rollouts: Batch,
    rewards: Column,
    mask: Column,
    learned: Column,
    greedy_scores_B: Float32s | None,
    components_KB: Float32s | None,
    *,
    num_samples: int,
) -> tuple[Column, Column]:
    """Advantages and returns, whole groups of samples at a time; what is over the batch is not done yet."""
    lengths, num_rows = mask.lengths, rollouts.num_rows
    advantages, returns = (Column(np.empty(len(mask.values), np.float32), lengths) for _ in range(2))
    in_pieces = estimator_of(algorithm).takes_pieces
    for start, stop in _blocks(lengths, _ADVANTAGE_TOKENS, num_samples=num_samples) if in_pieces else [(0, num_rows)]:
        rows = rollouts.between(start, stop)
        rewards_BT, mask_BT, learned_BT = (column.between(start, stop).pad() for column in (rewards, mask, learned))
        estimated = compute_advantages(
            algorithm,
            rewards_BT,
            learned_BT,
            groups_B=np.arange(rows.num_rows) // num_samples,
            values_BT=rows["values"].pad() if "values" in rows else None,
            scored_BT=mask_BT,
            greedy_scores_B=None if greedy_scores_B is None else greedy_scores_B[start:stop],
            components_KB=None if components_KB is None else components_KB[:, start:stop],
        )
        is_token_BT = rows["responses"].mask()
        for column, of_rows_BT in zip((advantages, returns), estimated, strict=True):
            column.between(start, stop).values[:] = of_rows_BT[is_token_BT]
    return advantages, returns


def _baseline(normalization: Normalization, greedy_scores: Float32s | None, num_samples: int) -> Float32s | None:
    """[B], of each response the greedy score of its prompt, on the scale of the rewards that it is subtracted from."""
    if greedy_scores is None:
        return None
    return np.repeat(shape_scores(normalization, PlacedScores(greedy_scores)).of_ends, num_samples).astype(np.float32)


def _kept_or_all(learned: Column, mask: Column) -> Column:
    """What is learned from; of a response that is rejected as a whole, all that counts."""
    is_rejected_B = learned.sums() == 0
    return Column(learned.values | (mask.values & np.repeat(is_rejected_B, mask.lengths)), mask.lengths)


def _penalise_kl(
    algorithm: AlgorithmConfig, rollouts: Batch, rewards: Column, mask: Column, *, kl_coef: float
) -> Float64s:
    """Takes the KL penalty from the rewards, in place; returns the KL [B], in nats."""
    kl_B = np.zeros(rollouts.num_rows)
    for start, stop in _blocks(mask.lengths, _ADVANTAGE_TOKENS):
        columns = (rollouts["old_log_probs"], rollouts["ref_log_probs"], mask, rewards)
        log_probs_BT, ref_log_probs_BT, mask_BT, rewards_BT = (one.between(start, stop).pad() for one in columns)
        kl_BT = kl_divergence(log_probs_BT, ref_log_probs_BT, mask_BT, kl_penalty=algorithm.kl_penalty)
        rewards_BT, kl_B[start:stop] = penalise_kl(rewards_BT, kl_BT, mask_BT, kl_coef=kl_coef)
        part = rewards.between(start, stop)
        part.values[:] = part.unpad(rewards_BT).values
    return kl_B


@dataclass(frozen=True, eq=False)
class _Corrected:
    """As `Correction`, of ragged rows."""

    kept: Column
    weights: Column | None
    metrics: Mapping[str, float]


def _correct(algorithm: AlgorithmConfig, rollouts: Batch, mask: Column) -> _Corrected:
    """Weights, rejection and metrics, where both log-probs are known; else every token is kept as it is."""
    if not ("old_log_probs" in rollouts and "rollout_log_probs" in rollouts):
        if algorithm.rollout_correction.is_active:
            raise ValueError("rollout correction needs old_log_probs and rollout_log_probs")
        return _Corrected(mask, None, {})
    old, sampled = rollouts["old_log_probs"], rollouts["rollout_log_probs"]
    if not algorithm.rollout_correction.is_active:
        mismatch = Mismatch()
        for start, stop in _blocks(mask.lengths, _MISMATCH_TOKENS):
            mismatch.add(*(column.between(start, stop).pad() for column in (old, sampled, mask)))
        return _Corrected(mask, None, mismatch.metrics())
    correction = correct_rollout(algorithm.rollout_correction, old.pad(), sampled.pad(), mask.pad())
    weights = None if correction.weights is None else mask.unpad(correction.weights)
    return _Corrected(mask.unpad(correction.kept), weights, correction.metrics)


def _learned(kept: Column, mask: Column, left_out_B: Mask | None) -> Column:
    """What was kept, without the responses that are left out as a whole."""
    kept_N = kept.values if left_out_B is None else kept.values & ~np.repeat(left_out_B, kept.lengths)
    return Column(_enough_to_learn(kept_N, mask.values), kept.lengths)


def _enough_to_learn(kept_N: Mask, mask_N: Mask) -> Mask:
    """What was kept, or nothing if a single token is left, which no statistic can be made of."""
    if kept_N.sum() >= 2 or mask_N.sum() < 2:
        return kept_N
    kept, total = kept_N.sum(), mask_N.sum()
    log.warning("%d of %d response tokens are left to learn from: nothing is learned in this step", kept, total)
    return np.zeros_like(kept_N)
