"""Token rewards: the score of each response, and the KL penalty that keeps the policy near the reference.

B sequences, T response tokens, right-padded. float32 in and out, float64 inside.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from controller.masked import masked_mean
from splitppo.config import AlgorithmConfig, ConfigError

Float32s = NDArray[np.float32]
Float64s = NDArray[np.float64]
Mask = NDArray[np.bool_]


def _k1(log_ratio: Float64s) -> Float64s:
    return log_ratio


def _k2(log_ratio: Float64s) -> Float64s:
    return 0.5 * log_ratio**2


def _k3(log_ratio: Float64s) -> Float64s:
    k = np.clip(-log_ratio, -20.0, 20.0)
    return np.clip(np.exp(k) - k - 1.0, -10.0, 10.0)


# Estimators of the KL from log_ratio = log_probs - ref_log_probs of a sampled token (Schulman, 2020, "Approximating
# KL divergence"); each has verl's name and the short one.
KL_ESTIMATORS: Mapping[str, Callable[[Float64s], Float64s]] = {
    "kl": _k1,
    "k1": _k1,
    "abs": np.abs,
    "mse": _k2,
    "k2": _k2,
    "low_var_kl": _k3,
    "k3": _k3,
}


def check_kl_penalty(kl_penalty: str) -> None:
    """ConfigError, listing the known estimators, if there is none of that name."""
    if kl_penalty not in KL_ESTIMATORS:
        raise ConfigError(f"key 'algorithm.kl_penalty': expected one of {', '.join(KL_ESTIMATORS)}, got {kl_penalty!r}")


def kl_divergence(log_probs_BT: Float32s, ref_log_probs_BT: Float32s, mask_BT: Mask, *, kl_penalty: str) -> Float64s:
    """Estimate of the KL per token, [B, T] float64, in nats, zero outside the mask.

    Raises:
        ConfigError: `kl_penalty` is no key of KL_ESTIMATORS.
    """
    check_kl_penalty(kl_penalty)
    log_ratio_BT = np.where(mask_BT, log_probs_BT.astype(np.float64) - ref_log_probs_BT, 0.0)
    return KL_ESTIMATORS[kl_penalty](log_ratio_BT)


def token_rewards(scores_B: NDArray[np.floating[Any]], mask_BT: Mask) -> tuple[Float32s, int]:
    """Puts each response's score on its last token inside the mask.

    Returns:
        (rewards [B, T] float32, number of responses without any token, whose score has no place).
    """
    rewards_BT = np.zeros(mask_BT.shape, np.float32)
    rows = np.flatnonzero(mask_BT.any(axis=1))
    if len(rows):
        last_B = mask_BT.shape[1] - 1 - np.argmax(mask_BT[rows, ::-1], axis=1)
        rewards_BT[rows, last_B] = scores_B[rows]
    return rewards_BT, len(mask_BT) - len(rows)


def penalise_kl(
    rewards_BT: Float32s,
    log_probs_BT: Float32s,
    ref_log_probs_BT: Float32s,
    mask_BT: Mask,
    *,
    kl_coef: float,
    kl_penalty: str,
) -> tuple[Float32s, float]:
    """Subtracts kl_coef * KL from the reward of every token inside the mask.

    Returns:
        (rewards [B, T] float32, mean KL: over rows, of each row's mean over its tokens; an empty row counts as 0).
    """
    kl_BT = kl_divergence(log_probs_BT, ref_log_probs_BT, mask_BT, kl_penalty=kl_penalty)
    mean_kl = float(masked_mean(kl_BT, mask_BT, axis=1).mean()) if len(mask_BT) else 0.0
    return np.where(mask_BT, rewards_BT - kl_coef * kl_BT, 0.0).astype(np.float32), mean_kl


def next_kl_coef(config: AlgorithmConfig, kl_coef: float, current_kl: float | None, *, num_samples: int) -> float:
    """The coefficient after a step: as it was (fixed), or moved so that the KL is held near a target (adaptive).

    Adaptive (Ziegler et al., 2019, section 2.2): times 1 + clip(kl / target - 1, +-0.2) * num_samples / horizon.

    Args:
        config: kl_ctrl, kl_target and kl_horizon are read.
        kl_coef: the coefficient of this step; run state, so it goes into the checkpoint.
        current_kl: mean KL of this step, in nats; None if the step had none.
        num_samples: responses in this step.

    Raises:
        ValueError: the KL is not finite.
    """
    if config.kl_ctrl == "fixed" or current_kl is None:
        return kl_coef
    if not math.isfinite(current_kl):
        raise ValueError(f"the adaptive KL controller needs a finite KL, got {current_kl}")
    error = min(max(current_kl / config.kl_target - 1.0, -0.2), 0.2)
    return kl_coef * (1.0 + error * num_samples / config.kl_horizon)
