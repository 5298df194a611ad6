"""From rollouts, log-probs, values and scores to what the updates need: rewards, advantages, returns.

B responses (prompts x samples, ordered by prompt, then sample), T response tokens, right-padded.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from controller.advantages import compute_advantages
from controller.kl import penalise_kl, token_rewards
from controller.masked import Mask
from controller.rollout_correction import Correction, correct_rollout
from splitppo.batch import Batch
from splitppo.config import AlgorithmConfig

log = logging.getLogger(__name__)

Float32s = NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class Experience:
    """What one step learns from.

    Attributes:
        batch: prompts, responses, what the services computed for them, advantages, returns; response_mask where
            tokens may be rejected, rollout_is_weights where they are weighted.
        scores: [B], one per response.
        rewards: [B, T], KL penalty included; 0 outside the mask.
        mask: [B, T], response tokens that count.
        learned: [B, T], those of them that both models learn from: the others are rejected.
        kl: mean KL to the reference, nats; None without KL in the reward.
        kl_coef: coefficient that was used.
        num_empty: responses without any token, whose score has no place.
        metrics: how the rollout engine's log-probs compare with the trainer's, where both are known.
    """

    batch: Batch
    scores: Float32s
    rewards: Float32s
    mask: Mask
    learned: Mask
    kl: float | None
    kl_coef: float
    num_empty: int
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        """Prompt and response tokens."""
        return len(self.batch["prompts"].values) + len(self.batch["responses"].values)

    @property
    def actor_columns(self) -> Batch:
        """What the actor's update needs beside what the actor has."""
        return self._present("advantages", "response_mask", "rollout_is_weights")

    @property
    def critic_columns(self) -> Batch:
        """What the critic's update needs beside what the critic has."""
        return self._present("returns", "response_mask")

    def _present(self, *names: str) -> Batch:
        return self.batch.select([name for name in names if name in self.batch])

    def padded(self, column: str) -> Float32s:
        """[B, T] float32 of a response-aligned column."""
        return self.batch[column].pad(self.mask.shape[1])


def assemble_experience(
    algorithm: AlgorithmConfig,
    rollouts: Batch,
    scores_B: Float32s,
    *,
    num_samples: int,
    kl_coef: float,
) -> Experience:
    """Corrects rollouts, puts scores on the last tokens, subtracts the KL penalty, estimates advantages and returns.

    A rejected token gets no advantage and no return, and the estimators bridge it. A response keeps its score as long
    as one token is left, on the last of those; one that is rejected as a whole still counts in its group's baseline.

    Args:
        algorithm: estimator, KL penalty and rollout correction.
        rollouts: prompts, responses and whatever the services computed for them.
        scores_B: [B], one per response.
        num_samples: responses per prompt; samples of one prompt are neighbours.
        kl_coef: the KL controller's coefficient at this step.
    """
    responses = rollouts["responses"]
    mask_BT = responses.mask()
    if "response_mask" in rollouts:
        mask_BT &= rollouts["response_mask"].pad().astype(np.bool_)
    padded: Mapping[str, Float32s] = {
        name: rollouts[name].pad(mask_BT.shape[1])
        for name in ("old_log_probs", "ref_log_probs", "rollout_log_probs", "values")
        if name in rollouts
    }
    correction = Correction(mask_BT, None, {})
    if "old_log_probs" in padded and "rollout_log_probs" in padded:
        correction = correct_rollout(
            algorithm.rollout_correction, padded["old_log_probs"], padded["rollout_log_probs"], mask_BT
        )
    elif algorithm.rollout_correction.is_active:
        raise ValueError("rollout correction needs old_log_probs and rollout_log_probs")
    learned_BT = _enough_to_learn(correction.kept, mask_BT)
    place_BT = np.where(learned_BT.any(axis=1, keepdims=True), learned_BT, mask_BT)
    rewards_BT, num_empty = token_rewards(scores_B, place_BT)
    kl: float | None = None
    if algorithm.use_kl_in_reward:
        rewards_BT, kl = penalise_kl(
            rewards_BT,
            padded["old_log_probs"],
            padded["ref_log_probs"],
            mask_BT,
            kl_coef=kl_coef,
            kl_penalty=algorithm.kl_penalty,
        )
    advantages_BT = returns_BT = np.zeros(mask_BT.shape, np.float32)
    if learned_BT.any() or not mask_BT.any():
        advantages_BT, returns_BT = compute_advantages(
            algorithm.adv_estimator,
            rewards_BT,
            learned_BT,
            groups_B=np.arange(rollouts.num_rows) // num_samples,
            values_BT=padded.get("values"),
            scored_BT=mask_BT,
            gamma=algorithm.gamma,
            lam=algorithm.lam,
            norm_adv_by_std=algorithm.norm_adv_by_std_in_grpo,
        )
    columns = {"advantages": responses.unpad(advantages_BT), "returns": responses.unpad(returns_BT)}
    if algorithm.rollout_correction.rejections:
        columns["response_mask"] = responses.unpad(learned_BT.astype(np.uint8))
    if correction.weights is not None:
        columns["rollout_is_weights"] = responses.unpad(correction.weights)
    return Experience(
        rollouts.merge(Batch(rollouts.num_rows, columns)),
        scores_B,
        rewards_BT,
        mask_BT,
        learned_BT,
        kl,
        kl_coef,
        num_empty,
        correction.metrics,
    )


def _enough_to_learn(kept_BT: Mask, mask_BT: Mask) -> Mask:
    """What was kept, or nothing if rejection left a single token, which no statistic can be made of."""
    if kept_BT.sum() >= 2 or mask_BT.sum() < 2:
        return kept_BT
    log.warning(
        "rollout correction keeps %d of %d response tokens: nothing is learned in this step",
        kept_BT.sum(),
        mask_BT.sum(),
    )
    return np.zeros_like(kept_BT)
