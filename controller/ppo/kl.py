"""KL estimators on sampled tokens, and the adaptive coefficient of the KL penalty in the reward.

d is the log-prob of a token under the policy that sampled it minus its log-prob under the other policy, in nats. The
mean of d over tokens is the KL of the sampler from the other policy. The estimators are those of Schulman, 2020,
"Approximating KL divergence".
B sequences, T response tokens, right-padded. float64 inside.
"""

import math
from collections.abc import Callable, Mapping

import numpy as np

from controller.ppo.masked_stats import Float32s, Float64s, Mask
from splitppo.config import AlgorithmConfig
from splitppo.config.sections.teacher import TeacherConfig

MAX_LOG_RATIO = 20.0  # nats; log-ratios are clamped to it before they are exponentiated


def k1(d: Float64s) -> Float64s:
    """Estimates the KL per token as k1 = d, the log-ratio in nats: unbiased, of either sign."""
    return d


def k2(d: Float64s) -> Float64s:
    """Estimates the KL per token as k2 = d^2 / 2, d the log-ratio in nats: biased, never negative."""
    return np.asarray(0.5 * d**2)


def k3(d: Float64s) -> Float64s:
    """Estimates the KL per token as k3 = exp(-d) + d - 1, d the log-ratio in nats: unbiased, never negative."""
    return np.asarray(np.exp(-d) + d - 1.0)


# By verl's name and the short name; the names are those of splitppo/config/sections/algorithm.py.
KL_ESTIMATORS: Mapping[str, Callable[[Float64s], Float64s]] = {
    "kl": k1,
    "k1": k1,
    "abs": np.abs,
    "mse": k2,
    "k2": k2,
    "low_var_kl": k3,
    "k3": k3,
}


def clamp_log_ratio(log_ratio: Float64s) -> Float64s:
    """Clamps log-ratios to +-MAX_LOG_RATIO nats, so that their exponentials stay finite."""
    return np.asarray(np.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO))


def kl_divergence(log_probs_BT: Float32s, ref_log_probs_BT: Float32s, mask_BT: Mask, *, kl_penalty: str) -> Float64s:
    """Estimates the KL of the sampling policy from the reference per token: [B, T], in nats, zero outside the mask.

    For k3, d is clamped, and the estimate is clipped to +-10. A "+" at the end of kl_penalty changes only the gradient
    of a loss, and does not count here.
    """
    d_BT = np.where(mask_BT, log_probs_BT.astype(np.float64) - ref_log_probs_BT, 0.0)
    estimate = KL_ESTIMATORS[kl_penalty.removesuffix("+")]
    return np.clip(k3(clamp_log_ratio(d_BT)), -10.0, 10.0) if estimate is k3 else estimate(d_BT)


def next_kl_coef(
    config: AlgorithmConfig | TeacherConfig, kl_coef: float, current_kl: float | None, *, num_samples: int
) -> float:
    """Computes a KL's coefficient after a step: unchanged (fixed), or moved to reach a target KL (adaptive).

    Adaptive (Ziegler et al., 2019, section 2.2): kl_coef * (1 + clip(kl / target - 1, +-0.2) * num_samples / horizon),
    where kl is the step's mean KL in nats (None: it was not measured) and num_samples the number of its responses.

    Raises:
        ValueError: the KL is not finite.
    """
    if config.kl_ctrl == "fixed" or current_kl is None:
        return kl_coef
    if not math.isfinite(current_kl):
        raise ValueError(f"the adaptive KL controller needs a finite KL, got {current_kl}")
    error = min(max(current_kl / config.kl_target - 1.0, -0.2), 0.2)
    return kl_coef * (1.0 + error * num_samples / config.kl_horizon)
