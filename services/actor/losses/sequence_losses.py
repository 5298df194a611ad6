"""Policy losses with one probability ratio per response (GSPO, GMPO), for loss_agg_mode seq-mean-token-mean.

Legend: N response tokens of all rows of a micro-batch, packed.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from services.actor.losses.clip_losses import ppo_clip
from services.actor.losses.policy_loss import PolicyTokens
from splitppo.config import ActorConfig


def gspo(tokens: PolicyTokens, config: ActorConfig) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Computes the GSPO loss per token (Zheng et al., 2025, eq. 5, 13, 14): the PPO clip of the response's ratio.

        log s = mean over the response's tokens of (log_prob - old_log_prob)
        r = s log_prob's gradient: exp(sg(log s) + log_prob - sg(log_prob))
        loss = max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high))

    Where all tokens of a response have the same advantage, value and gradient are those of eq. 5. Metric: pg_clipfrac
    (the clipped term is the larger one). verl up to 0.9.0 takes seq-mean-token-mean whatever loss_agg_mode says.
    """
    log_ratio_N = tokens.row_mean(tokens.log_ratio).detach() + tokens.log_probs - tokens.log_probs.detach()
    loss_N, is_clipped_N = ppo_clip(log_ratio_N.exp(), tokens.advantages, config)
    return loss_N, {"pg_clipfrac": is_clipped_N.float()}


def geo_mean(tokens: PolicyTokens, config: ActorConfig) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Computes the GMPO loss (Zhao et al., 2025, eq. 4): the geometric mean of ratios clipped token by token.

        d = log_prob - old_log_prob
        c = min(d, clip(d, -clip_low, clip_high)) where A > 0, max(d, clip(d, -clip_low, clip_high)) where A < 0
        loss = -A exp(mean over the response's tokens of c), the same on each of its tokens

    A is the mean of the response's advantages, and the bounds are of the log-ratio: the paper's e^-0.4 and e^0.4 are
    clip_ratio 0.4. Metrics: pg_clipfrac and pg_clipfrac_lower, clipped tokens of A > 0 and of A < 0. verl multiplies by
    the geometric mean of rollout_is_weights, and takes the mean over the rows of each micro-batch, also those that are
    masked as a whole, whatever loss_agg_mode says.
    """
    advantages_N, log_ratio_N = tokens.row_mean(tokens.advantages), tokens.log_ratio
    bounded_N = log_ratio_N.clamp(-config.clip_low, config.clip_high)
    lower_N, upper_N = torch.minimum(log_ratio_N, bounded_N), torch.maximum(log_ratio_N, bounded_N)
    clipped_N = torch.where(advantages_N > 0, lower_N, upper_N)
    is_clipped_N = clipped_N != log_ratio_N
    return -advantages_N * tokens.row_mean(clipped_N).exp(), {
        "pg_clipfrac": (is_clipped_N & (advantages_N > 0)).float(),
        "pg_clipfrac_lower": (is_clipped_N & (advantages_N < 0)).float(),
    }
