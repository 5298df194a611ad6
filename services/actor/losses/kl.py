"""Estimates the KL divergence between policy and reference on sampled tokens, with a gradient.

Shapes: N response tokens of all rows of a micro-batch, packed.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from services.actor.losses.policy_loss import MAX_LOG_RATIO
from splitppo.config.section import KlEstimator

# Bound of the k3 estimate.
MAX_K3 = 10.0


def _k2(log_ratio_N: Tensor) -> Tensor:
    return 0.5 * log_ratio_N.square()


def _k3(log_ratio_N: Tensor) -> Tensor:
    difference_N = (-log_ratio_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return (difference_N.exp() - difference_N - 1.0).clamp(-MAX_K3, MAX_K3)


_KL_ESTIMATES: Mapping[str, Callable[[Tensor], Tensor]] = {
    **dict.fromkeys(("kl", "k1"), torch.positive),
    "abs": torch.abs,
    **dict.fromkeys(("mse", "k2"), _k2),
    **dict.fromkeys(("low_var_kl", "k3"), _k3),
}


def kl_estimate(log_probs_N: Tensor, ref_log_probs_N: Tensor, name: KlEstimator) -> Tensor:
    """Estimates KL(policy, reference) at each token (Schulman, 2020, "Approximating KL divergence").

        d = log_prob - ref_log_prob;   kl, k1: d;   abs: |d|;   mse, k2: d^2 / 2;   low_var_kl, k3: exp(-d) + d - 1

    A trailing "+" in `name` keeps the value and takes k2's gradient, which is that of the true KL in expectation.
    """
    log_ratio_N = log_probs_N - ref_log_probs_N
    value_N = _KL_ESTIMATES[name.removesuffix("+")](log_ratio_N)
    if not name.endswith("+"):
        return value_N
    gradient_N = _k2(log_ratio_N)
    return value_N.detach() + gradient_N - gradient_N.detach()
