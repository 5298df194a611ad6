"""Policy-gradient losses GPG, REINFORCE, CISPO, DPPO and DRO: -A weight log_prob, where the weight gets no gradient.

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
    section = config.policy_loss
    log_weight_N = tokens.log_ratio.detach()
    if section.reinforce_is is None:
        log_weight_N = 0.0 * log_weight_N
    elif section.reinforce_is == "sequence":
        log_weight_N = tokens.row_sum(log_weight_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    weight_N = log_weight_N.exp()
    lower, upper = section.reinforce_bounds
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


def dppo_tv(tokens: PolicyTokens, config: ActorConfig) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Computes the DPPO loss with binary total variation (sampled token or any other token): D = |p - p_old|."""
    with torch.no_grad():
        divergence_N = (tokens.log_probs.exp() - tokens.old_log_probs.exp()).abs()
    return _masked_gradient(tokens, config, divergence_N)


def dppo_kl(tokens: PolicyTokens, config: ActorConfig) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Computes the DPPO loss with the binary KL (sampled token or any other token) as the divergence D.

        D = p_old log(p_old / p) + (1 - p_old) log((1 - p_old) / (1 - p))

    log(1 - p) is at least -MAX_LOG_RATIO; verl adds 1e-8 to 1 - p instead.
    """
    with torch.no_grad():
        old_N = tokens.old_log_probs.exp()
        others_N, old_others_N = (
            torch.log(-torch.expm1(log_probs_N)).clamp(min=-MAX_LOG_RATIO)
            for log_probs_N in (tokens.log_probs, tokens.old_log_probs)
        )
        divergence_N = old_N * (tokens.old_log_probs - tokens.log_probs) + (1.0 - old_N) * (old_others_N - others_N)
    return _masked_gradient(tokens, config, divergence_N)


def _masked_gradient(
    tokens: PolicyTokens, config: ActorConfig, divergence_N: Tensor
) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Computes the DPPO loss (2026, arXiv:2602.04879), which leaves out tokens whose probability has moved too far.

        loss = -A sg(M min(r, clip_ratio_c)) log_prob,   r = exp(log_prob - old_log_prob)

    The probability itself is compared with the old one, not the ratio r. M is 0 for a token whose divergence D(old,
    new) is over its threshold in the direction in which A pushes it: up and over clip_high where A > 0, down and over
    clip_low elsewhere. clip_ratio and its two sides are thresholds of D here, and clip_ratio_c truncates the importance
    weight (the paper advises a large one, section 5.4: 20; null: none). Metrics: pg_clipfrac (M is 0),
    pg_clipfrac_lower (a weight that counts is truncated).
    """
    with torch.no_grad():
        moved_N = tokens.log_probs - tokens.old_log_probs
        ratio_N = tokens.log_ratio.exp()
        too_high_N = (moved_N > 0) & (divergence_N > config.clip_high)
        too_low_N = (moved_N < 0) & (divergence_N > config.clip_low)
        left_out_N = torch.where(tokens.advantages > 0, too_high_N, too_low_N)
        largest = torch.inf if config.clip_ratio_c is None else config.clip_ratio_c
        weight_N = torch.where(left_out_N, 0.0, ratio_N.clamp(max=largest))
        truncated_N = ~left_out_N & (weight_N < ratio_N)
    loss_N = -tokens.advantages * weight_N * tokens.log_probs
    return loss_N, {"pg_clipfrac": left_out_N.float(), "pg_clipfrac_lower": truncated_N.float()}
