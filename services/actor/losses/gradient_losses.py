"""Policy-gradient losses GPG, REINFORCE, CISPO and DRO: -A weight log_prob, where the weight gets no gradient.

Legend: N response tokens of all rows of a micro-batch, packed.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from services.actor.losses.policy_loss import MAX_LOG_RATIO, PolicyTokens
from splitppo.config import ActorConfig


def gpg(tokens: PolicyTokens, _config: ActorConfig) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Computes the GPG loss (Chu et al., 2025, eq. 3): the plain policy gradient, for algorithm.adv_estimator gpg.

    loss = -A log_prob
    """
    return -tokens.advantages * tokens.log_probs, {}


def reinforce(tokens: PolicyTokens, config: ActorConfig) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Computes the off-policy REINFORCE loss (Williams, 1992) with truncated importance weights (Ionides, 2008).

        loss = -A sg(min(w, reinforce_is_threshold)) log_prob

    w is 1; with reinforce_is the ratio exp(log_prob - old_log_prob) of each token, or the product of the ratios over
    the response. With two bounds a weight outside of the bounds is 0 (IcePop, Ling Team, 2025). Metric: pg_clipfrac
    (the weight is outside of its bounds).
    """
    section, log_weight_N = config.policy_loss, tokens.log_ratio.detach()
    if section.reinforce_is is None:
        log_weight_N = 0.0 * log_weight_N
    elif section.reinforce_is == "sequence":
        log_weight_N = tokens.row_sum(log_weight_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    weight_N, (lower, upper) = log_weight_N.exp(), section.reinforce_bounds
    outside_N = weight_N > upper if lower is None else (weight_N < lower) | (weight_N > upper)
    bounded_N = torch.where(outside_N, upper if lower is None else 0.0, weight_N)
    return -tokens.advantages * bounded_N * tokens.log_probs, {"pg_clipfrac": outside_N.float()}


def cispo(tokens: PolicyTokens, config: ActorConfig) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Computes the CISPO loss (MiniMax, 2025, eq. 4 and 5): clips each token's weight, never its gradient.

        r = exp(log_prob - old_log_prob)
        loss = -A sg(clip(r, 1 - clip_low, 1 + clip_high)) log_prob

    Metric: pg_clipfrac (the ratio is outside of its bounds).
    """
    ratio_N = tokens.log_ratio.detach().exp()
    clipped_N = ratio_N.clamp(1.0 - config.clip_low, 1.0 + config.clip_high)
    return -tokens.advantages * clipped_N * tokens.log_probs, {"pg_clipfrac": (clipped_N != ratio_N).float()}


def dro(tokens: PolicyTokens, config: ActorConfig) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Computes the DRO loss (after Richemond et al., 2024): the policy gradient plus a penalty, the squared log-ratio.

    loss = -(A log_prob - dro_beta / 2 (log_prob - old_log_prob)^2)
    """
    squared_N = (tokens.log_probs - tokens.old_log_probs).square()
    return -tokens.advantages * tokens.log_probs + 0.5 * config.policy_loss.dro_beta * squared_N, {}
