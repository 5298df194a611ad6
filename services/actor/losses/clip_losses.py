"""Policy losses PPO clip, SAPO, GSPO and GMPO, which cut or damp a gradient once its ratio is far from 1.

The last two have one ratio per response instead of one per token, for loss_agg_mode seq-mean-token-mean.

Legend: N response tokens of all rows of a micro-batch, packed.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from services.actor.losses.policy_loss import PolicyTokens
from splitppo.config import ActorConfig


def vanilla(tokens: PolicyTokens, config: ActorConfig) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Computes the PPO clip loss (Schulman et al., 2017, eq. 7) with dual clip (Ye et al., 2020, eq. 5) per token.

        r = exp(log_prob - old_log_prob)
        c1 = max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high))
        loss = c1 where A >= 0, min(-A clip_ratio_c, c1) where A < 0

    Without clip_ratio_c the loss is c1. Metrics: pg_clipfrac (the clipped term is the larger one), pg_clipfrac_lower
    (the dual clip acts).
    """
    single_N, is_clipped_N = ppo_clip(tokens.log_ratio.exp(), tokens.advantages, config)
    loss_N, at_dual_clip_N = dual_clip(single_N, tokens.advantages, config)
    return loss_N, {"pg_clipfrac": is_clipped_N.float(), "pg_clipfrac_lower": at_dual_clip_N.float()}


def ppo_clip(ratio_N: Tensor, advantages_N: Tensor, config: ActorConfig) -> tuple[Tensor, Tensor]:
    """Computes max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)), [N], and where the clipped term is larger, bool."""
    unclipped_N = -advantages_N * ratio_N
    clipped_N = -advantages_N * ratio_N.clamp(1.0 - config.clip_low, 1.0 + config.clip_high)
    return torch.maximum(unclipped_N, clipped_N), clipped_N > unclipped_N


def dual_clip(loss_N: Tensor, advantages_N: Tensor, config: ActorConfig) -> tuple[Tensor, Tensor]:
    """Limits a loss [N] to at most -A clip_ratio_c where A < 0 (dual clip); returns it and a mask [N] of the limit."""
    if config.clip_ratio_c is None:
        return loss_N, torch.zeros_like(advantages_N, dtype=torch.bool)
    ceiling_N = -advantages_N * config.clip_ratio_c
    negative_N = advantages_N < 0
    limited_N = torch.where(negative_N, torch.minimum(ceiling_N, loss_N), loss_N)
    return limited_N, negative_N & (loss_N > ceiling_N)


def sapo(tokens: PolicyTokens, config: ActorConfig) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Computes the SAPO loss (Gao et al., 2025, eq. 5, 6): a soft gate of slope 1 at ratio 1 replaces the PPO clip.

        r = exp(log_prob - old_log_prob);   tau = tau_pos where A > 0, else tau_neg
        loss = -A (4 / tau) sigmoid(tau (r - 1))

    The paper takes the mean over tokens, then over sequences: loss_agg_mode seq-mean-token-mean.
    """
    section = config.policy_loss
    tau_N = torch.where(tokens.advantages > 0, section.tau_pos, section.tau_neg)
    gate_N = 4.0 / tau_N * torch.sigmoid(tau_N * (tokens.log_ratio.exp() - 1.0))
    return -tokens.advantages * gate_N, {}


def gspo(tokens: PolicyTokens, config: ActorConfig) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Computes the GSPO loss per token (Zheng et al., 2025, eq. 5, 13, 14): the PPO clip of the response's ratio.

        log s = mean over the response's tokens of (log_prob - old_log_prob)
        r = exp(sg(log s) + log_prob - sg(log_prob)), so r is s, and log r has the gradient of log_prob
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
    advantages_N = tokens.row_mean(tokens.advantages)
    log_ratio_N = tokens.log_ratio
    bounded_N = log_ratio_N.clamp(-config.clip_low, config.clip_high)
    lower_N = torch.minimum(log_ratio_N, bounded_N)
    upper_N = torch.maximum(log_ratio_N, bounded_N)
    clipped_N = torch.where(advantages_N > 0, lower_N, upper_N)
    is_clipped_N = clipped_N != log_ratio_N
    return -advantages_N * tokens.row_mean(clipped_N).exp(), {
        "pg_clipfrac": (is_clipped_N & (advantages_N > 0)).float(),
        "pg_clipfrac_lower": (is_clipped_N & (advantages_N < 0)).float(),
    }
