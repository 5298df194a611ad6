"""From rollouts, log-probs, values and scores to what the updates need: rewards, advantages, returns.

B responses (prompts x samples, ordered by prompt, then sample), T response tokens, right-padded.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from controller.ppo.advantages import compute_advantages
from controller.ppo.kl import kl_divergence
from controller.ppo.masked_stats import Float32s, Mask
from controller.ppo.rollout_correction import Correction, correct_rollout
from controller.ppo.token_rewards import penalise_kl, token_rewards
from splitppo.batch import Batch
from splitppo.config import AlgorithmConfig

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Experience:
    """What one step learns from. Arrays over tokens are [B, T], 0 outside the mask; scores are [B].

    Attributes:
        batch: prompts, responses, what the services computed for them, advantages, returns; response_mask where
            tokens may be rejected, rollout_is_weights where they are weighted.
        rewards: KL penalty included.
        mask: response tokens that count.
        learned: those of them that both models learn from: the others are rejected.
        kl: mean KL to the reference, nats; None without KL in the reward.
        metrics: of the KL in the reward, and of how the rollout backend's log-probs compare with the trainer's.
    """

    batch: Batch
    scores: Float32s
    rewards: Float32s
    mask: Mask
    learned: Mask
    advantages: Float32s
    returns: Float32s
    kl: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        """Prompt and response tokens."""
        return len(self.batch["prompts"].values) + len(self.batch["responses"].values)

    def actor_columns(self, *, lacks_reference: bool = False, lacks_old: bool = False) -> Batch:
        """What the actor's update needs beside what it has; it may lack the reference's or the old log-probs."""
        others = {"ref_log_probs": lacks_reference, "old_log_probs": lacks_old}
        lacking = (name for name, lacks in others.items() if lacks)
        return self._present("advantages", "response_mask", "rollout_is_weights", *lacking)

    @property
    def critic_columns(self) -> Batch:
        """What the critic's update needs beside what the critic has."""
        return self._present("returns", "response_mask")

    def _present(self, *names: str) -> Batch:
        return self.batch.select([name for name in names if name in self.batch])


def assemble_experience(
    algorithm: AlgorithmConfig, rollouts: Batch, scores_B: Float32s, *, num_samples: int, kl_coef: float
) -> Experience:
    """Corrects rollouts, puts scores on the last tokens, subtracts the KL penalty, estimates advantages and returns.

    A rejected token gets no advantage and no return, and the estimators bridge it. A response keeps its score as long
    as one token is left, on the last of those; one that is rejected as a whole still counts in its group's baseline.

    `rollouts` come with whatever the services computed for them; the `num_samples` of one prompt are neighbours.
    """
    responses = rollouts["responses"]
    mask_BT = responses.mask()
    if "response_mask" in rollouts:
        mask_BT &= rollouts["response_mask"].pad().astype(np.bool_)
    correction = _correct(algorithm, rollouts, mask_BT)
    if algorithm.rollout_correction.bypasses and "rollout_log_probs" in rollouts:
        # In checked steps too, where both are known: whether a step is checked must not change what is learned.
        rollouts = rollouts.merge(Batch(rollouts.num_rows, {"old_log_probs": rollouts["rollout_log_probs"]}))
    learned_BT = _enough_to_learn(correction.kept, mask_BT)
    rewards_BT = token_rewards(scores_B, np.where(learned_BT.any(axis=1, keepdims=True), learned_BT, mask_BT))
    kl, metrics = None, {**correction.metrics}
    if algorithm.use_kl_in_reward:
        log_probs_BT, ref_log_probs_BT = rollouts["old_log_probs"].pad(), rollouts["ref_log_probs"].pad()
        kl_BT = kl_divergence(log_probs_BT, ref_log_probs_BT, mask_BT, kl_penalty=algorithm.kl_penalty)
        rewards_BT, kl = penalise_kl(rewards_BT, kl_BT, mask_BT, kl_coef=kl_coef)
        metrics |= {"actor/reward_kl_penalty": kl, "actor/reward_kl_penalty_coeff": kl_coef}
    advantages_BT = returns_BT = np.zeros(mask_BT.shape, np.float32)
    if learned_BT.any() or not mask_BT.any():
        advantages_BT, returns_BT = compute_advantages(
            algorithm,
            rewards_BT,
            learned_BT,
            groups_B=np.arange(rollouts.num_rows) // num_samples,
            values_BT=rollouts["values"].pad() if "values" in rollouts else None,
            scored_BT=mask_BT,
        )
    columns = {"advantages": responses.unpad(advantages_BT), "returns": responses.unpad(returns_BT)}
    if algorithm.rollout_correction.rejections:
        columns["response_mask"] = responses.unpad(learned_BT.astype(np.uint8))
    if correction.weights is not None:
        columns["rollout_is_weights"] = responses.unpad(correction.weights)
    batch = rollouts.merge(Batch(rollouts.num_rows, columns))
    return Experience(batch, scores_B, rewards_BT, mask_BT, learned_BT, advantages_BT, returns_BT, kl, metrics)


def _correct(algorithm: AlgorithmConfig, rollouts: Batch, mask_BT: Mask) -> Correction:
    """Weights, rejection and metrics, where both log-probs are known; else every token is kept as it is."""
    if "old_log_probs" in rollouts and "rollout_log_probs" in rollouts:
        old_BT, rollout_BT = rollouts["old_log_probs"].pad(), rollouts["rollout_log_probs"].pad()
        return correct_rollout(algorithm.rollout_correction, old_BT, rollout_BT, mask_BT)
    if algorithm.rollout_correction.is_active:
        raise ValueError("rollout correction needs old_log_probs and rollout_log_probs")
    return Correction(mask_BT, None, {})


def _enough_to_learn(kept_BT: Mask, mask_BT: Mask) -> Mask:
    """What was kept, or nothing if rejection left a single token, which no statistic can be made of."""
    if kept_BT.sum() >= 2 or mask_BT.sum() < 2:
        return kept_BT
    kept, total = kept_BT.sum(), mask_BT.sum()
    log.warning("rollout correction keeps %d of %d response tokens: nothing is learned in this step", kept, total)
    return np.zeros_like(kept_BT)
