"""From rollouts, log-probs, values and scores to what the updates need: rewards, advantages, returns.

B responses (prompts x samples, ordered by prompt, then sample), T response tokens, right-padded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from controller.advantages import compute_advantages
from controller.kl import penalise_kl, token_rewards
from splitppo.batch import Batch
from splitppo.config import AlgorithmConfig

Float32s = NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class Experience:
    """What one step learns from.

    Attributes:
        batch: prompts, responses, what the services computed for them, advantages, returns.
        scores: [B], one per response.
        rewards: [B, T], KL penalty included; 0 outside the mask.
        mask: [B, T], response tokens that count.
        kl: mean KL to the reference, nats; None without KL in the reward.
        kl_coef: coefficient that was used.
        num_empty: responses without any token, whose score has no place.
    """

    batch: Batch
    scores: Float32s
    rewards: Float32s
    mask: NDArray[np.bool_]
    kl: float | None
    kl_coef: float
    num_empty: int

    @property
    def num_tokens(self) -> int:
        """Prompt and response tokens."""
        return len(self.batch["prompts"].values) + len(self.batch["responses"].values)

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
    """Puts scores on the last response tokens, subtracts the KL penalty, estimates advantages and returns.

    Args:
        algorithm: estimator and KL penalty.
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
        for name in ("old_log_probs", "ref_log_probs", "values")
        if name in rollouts
    }
    rewards_BT, num_empty = token_rewards(scores_B, mask_BT)
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
    advantages_BT, returns_BT = compute_advantages(
        algorithm.adv_estimator,
        rewards_BT,
        mask_BT,
        groups_B=np.arange(rollouts.num_rows) // num_samples,
        values_BT=padded.get("values"),
        gamma=algorithm.gamma,
        lam=algorithm.lam,
        norm_adv_by_std=algorithm.norm_adv_by_std_in_grpo,
    )
    learned = Batch(
        rollouts.num_rows,
        {"advantages": responses.unpad(advantages_BT), "returns": responses.unpad(returns_BT)},
    )
    return Experience(rollouts.merge(learned), scores_B, rewards_BT, mask_BT, kl, kl_coef, num_empty)
