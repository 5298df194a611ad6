"""Policy losses, KL estimates and their sum: the actor's loss per response token.

A token's weight says how it enters the mini-batch's loss, so that the loss is a plain weighted sum, whatever the split
into micro-batches and ranks. Rows are whole in a micro-batch: a loss may also look at sequences.

Shapes: N response tokens of all rows of a micro-batch, packed.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from services.engine.batching.packing import ResponseTokens
from services.engine.token_metrics import LossOutput
from splitppo.config import ActorConfig

# Log-ratios are clamped to this before they are exponentiated.
MAX_LOG_RATIO = 20.0
# Bound of the k3 estimate.
MAX_K3 = 10.0


@dataclass(frozen=True)
class ClipRange:
    """Bounds of the probability ratio: [1 - low, 1 + high], and `dual` (> 1) for negative advantages."""

    low: float
    high: float
    dual: float


# (log_probs_N, old_log_probs_N, advantages_N, clip, tokens) -> (loss [N], metrics [N] each, reported as token means); a
# sequence loss finds the mask, the weights and the row of each token in the last argument.
PolicyLoss = Callable[[Tensor, Tensor, Tensor, ClipRange, ResponseTokens], tuple[Tensor, Mapping[str, Tensor]]]


def vanilla(
    log_probs_N: Tensor, old_log_probs_N: Tensor, advantages_N: Tensor, clip: ClipRange, _tokens: ResponseTokens
) -> tuple[Tensor, Mapping[str, Tensor]]:
    """PPO clip (Schulman et al., 2017, eq. 7) with dual clip (Ye et al., 2020, eq. 5).

        r = exp(log_prob - old_log_prob)
        c1 = max(-A r, -A clip(r, 1 - low, 1 + high))
        loss = c1 where A >= 0, min(-A dual, c1) where A < 0

    Metrics: pg_clipfrac (the clipped term is the larger one), pg_clipfrac_lower (the dual clip acts), ppo_kl (-log r).
    """
    log_ratio_N = (log_probs_N - old_log_probs_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio_N = log_ratio_N.exp()
    unclipped_N = -advantages_N * ratio_N
    clipped_N = -advantages_N * ratio_N.clamp(1.0 - clip.low, 1.0 + clip.high)
    single_N = torch.maximum(unclipped_N, clipped_N)
    ceiling_N = -advantages_N * clip.dual
    negative_N = advantages_N < 0
    loss_N = torch.where(negative_N, torch.minimum(ceiling_N, single_N), single_N)
    return loss_N, {
        "pg_clipfrac": (clipped_N > unclipped_N).float(),
        "pg_clipfrac_lower": (negative_N & (single_N > ceiling_N)).float(),
        "ppo_kl": -log_ratio_N,
    }


# Names that actor.loss_mode may take.
POLICY_LOSSES: Mapping[str, PolicyLoss] = {"vanilla": vanilla}


def _k1(log_ratio_N: Tensor) -> Tensor:
    return log_ratio_N


def _k2(log_ratio_N: Tensor) -> Tensor:
    return 0.5 * log_ratio_N.square()


def _k3(log_ratio_N: Tensor) -> Tensor:
    difference_N = (-log_ratio_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return (difference_N.exp() - difference_N - 1.0).clamp(-MAX_K3, MAX_K3)


_KL_ESTIMATES: Mapping[str, Callable[[Tensor], Tensor]] = {
    **dict.fromkeys(("kl", "k1"), _k1),
    "abs": torch.abs,
    **dict.fromkeys(("mse", "k2"), _k2),
    **dict.fromkeys(("low_var_kl", "k3"), _k3),
}
# Names that actor.kl_loss_type may take.
KL_ESTIMATES = frozenset(_KL_ESTIMATES) | frozenset(f"{name}+" for name in _KL_ESTIMATES)


def kl_estimate(log_probs_N: Tensor, ref_log_probs_N: Tensor, name: str) -> Tensor:
    """Estimates KL(policy, reference) at each token (Schulman, 2020, "Approximating KL divergence").

        d = log_prob - ref_log_prob;   kl, k1: d;   abs: |d|;   mse, k2: d^2 / 2;   low_var_kl, k3: exp(-d) + d - 1

    A trailing "+" keeps the value and takes k2's gradient, which is that of the true KL in expectation.

    Raises:
        ValueError: unknown name.
    """
    estimate = _KL_ESTIMATES.get(name.removesuffix("+"))
    if estimate is None:
        raise ValueError(f"unknown KL estimate {name!r}; known: {', '.join(sorted(KL_ESTIMATES))}")
    log_ratio_N = log_probs_N - ref_log_probs_N
    value_N = estimate(log_ratio_N)
    if not name.endswith("+"):
        return value_N
    gradient_N = _k2(log_ratio_N)
    return value_N.detach() + gradient_N - gradient_N.detach()


def actor_loss(config: ActorConfig) -> Callable[[Mapping[str, Tensor], ResponseTokens], LossOutput]:
    """The actor's loss: policy loss - entropy_coeff * entropy + kl_loss_coef * KL(policy, reference).

    The loss reads the outputs log_probs and entropy and the columns advantages, old_log_probs and, with use_kl_loss,
    ref_log_probs. Without old_log_probs the policy counts as the one that sampled (ratio 1, on-policy shortcut). Where
    there are rollout_is_weights, they multiply the policy loss of each token, and neither entropy nor KL.
    Its metrics are pg_loss and kl_loss, weighted as the loss is, and the token means pg_clipfrac, pg_clipfrac_lower,
    ppo_kl and entropy.
    """
    policy_loss = POLICY_LOSSES[config.loss_mode]
    clip = ClipRange(
        low=config.clip_ratio if config.clip_ratio_low is None else config.clip_ratio_low,
        high=config.clip_ratio if config.clip_ratio_high is None else config.clip_ratio_high,
        dual=config.clip_ratio_c,
    )

    def loss(outputs: Mapping[str, Tensor], tokens: ResponseTokens) -> LossOutput:
        columns, weights_N = tokens.columns, tokens.weights
        log_probs_N, entropy_N = outputs["log_probs"], outputs["entropy"]
        old_log_probs_N = columns.get("old_log_probs", log_probs_N.detach())
        token_loss_N, metrics = policy_loss(log_probs_N, old_log_probs_N, columns["advantages"], clip, tokens)
        if "rollout_is_weights" in columns:
            token_loss_N = token_loss_N * columns["rollout_is_weights"]
        total = (weights_N * token_loss_N).sum()
        sums = {"pg_loss": total}
        if config.entropy_coeff:
            total = total - config.entropy_coeff * (weights_N * entropy_N).sum()
        if config.use_kl_loss:
            kl_N = kl_estimate(log_probs_N, columns["ref_log_probs"], config.kl_loss_type)
            sums["kl_loss"] = (weights_N * kl_N).sum()
            total = total + config.kl_loss_coef * sums["kl_loss"]
        return LossOutput(total, sums, {**metrics, "entropy": entropy_N})

    return loss
