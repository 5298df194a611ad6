"""Losses that treat a few tokens of the mini-batch apart, those that drive the entropy down.

Which ones is decided for the whole mini-batch before it is split (`select_tokens`).

Legend: N response tokens of all rows of a micro-batch, packed.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from services.actor.losses.policy_loss import PolicyTokens
from splitppo.config import ActorConfig


def clip_cov(tokens: PolicyTokens, config: ActorConfig) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Clip-Cov (Cui et al., 2025, eq. 11 and 12): the PPO clip, without the tokens that were selected.

        loss = max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)), r = exp(log_prob - old_log_prob); selected: 0

    There is no dual clip. Metric: pg_clipfrac (selected, as with verl).
    """
    assert tokens.selected is not None
    ratio_N = tokens.log_ratio.exp()
    clipped_N = ratio_N.clamp(1.0 - config.clip_low, 1.0 + config.clip_high)
    loss_N = torch.maximum(-tokens.advantages * ratio_N, -tokens.advantages * clipped_N)
    return torch.where(tokens.selected, 0.0, loss_N), {"pg_clipfrac": tokens.selected.float()}


def kl_cov(tokens: PolicyTokens, config: ActorConfig) -> tuple[Tensor, Mapping[str, Tensor]]:
    """KL-Cov (Cui et al., 2025, eq. 13 and 14): the plain surrogate, with a KL penalty on the tokens selected.

        loss = -A r, r = exp(log_prob - old_log_prob); selected: + ppo_kl_coef |log_prob - old_log_prob|

    Metric: pg_klfrac (selected).
    """
    assert tokens.selected is not None
    penalty_N = config.policy_loss.ppo_kl_coef * (tokens.log_probs - tokens.old_log_probs).abs()
    loss_N = -tokens.advantages * tokens.log_ratio.exp()
    return loss_N + torch.where(tokens.selected, penalty_N, 0.0), {"pg_klfrac": tokens.selected.float()}
