"""How far the trainer's and the rollout engine's probabilities of the same sampled tokens differ, as metrics.

B responses, T response tokens, right-padded; N tokens inside the mask, R responses that have any. p is the trainer's
probability of a token, q the rollout engine's, r = p / q; exponents are clamped to +-MAX_LOG_RATIO. float64 throughout.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from controller.masked import Floats, Mask

Float64s = NDArray[np.float64]

# Log-ratios are clamped to this before they are exponentiated.
MAX_LOG_RATIO = 20.0


def safe_exp(values: Float64s) -> Float64s:
    """exp, of values clamped to +-MAX_LOG_RATIO."""
    return np.asarray(np.exp(np.clip(values, -MAX_LOG_RATIO, MAX_LOG_RATIO)))


def k1(log_ratio: Float64s) -> Float64s:
    """The estimate -log r of KL(q, p): unbiased (Schulman, 2020, "Approximating KL divergence")."""
    return -log_ratio


def k2(log_ratio: Float64s) -> Float64s:
    """The estimate (log r)^2 / 2: never negative, biased (same source)."""
    return np.asarray(0.5 * np.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO) ** 2)


def k3(log_ratio: Float64s) -> Float64s:
    """The estimate r - 1 - log r: never negative, unbiased (same source)."""
    clamped = np.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    return np.asarray(np.exp(clamped) - 1.0 - clamped)


def disagreement(old_log_probs_BT: Floats, rollout_log_probs_BT: Floats, mask_BT: Mask) -> dict[str, float]:
    """Everything that is measured in every step in which both are known, whether or not anything is corrected.

    Args:
        old_log_probs_BT: [B, T], log p, by the trainer's forward.
        rollout_log_probs_BT: [B, T], log q, as the engine sampled.
        mask_BT: [B, T] bool, response tokens that count.

    Returns:
        training/rollout_probs_diff_{max,mean,std} of |p - q|, training/rollout_log_probs_diff_{max,mean} of
        |log p - log q|, training/rollout_actor_probs_pearson_corr where it exists, and rollout_corr/... as verl names
        them; empty where no token counts.

    Raises:
        ValueError: shapes differ.
    """
    if not old_log_probs_BT.shape == rollout_log_probs_BT.shape == mask_BT.shape:
        raise ValueError(
            f"log-probs and mask must have the same shape, got {old_log_probs_BT.shape},"
            f" {rollout_log_probs_BT.shape} and {mask_BT.shape}"
        )
    if not mask_BT.any():
        return {}
    old_BT = np.where(mask_BT, old_log_probs_BT, 0.0).astype(np.float64)
    rollout_BT = np.where(mask_BT, rollout_log_probs_BT, 0.0).astype(np.float64)
    return {**_by_token(old_BT[mask_BT], rollout_BT[mask_BT]), **_by_response(old_BT, rollout_BT, mask_BT)}


def _by_token(old_N: Float64s, rollout_N: Float64s) -> dict[str, float]:
    p_N, q_N, log_ratio_N = np.exp(old_N), np.exp(rollout_N), old_N - rollout_N
    diff_N = np.abs(p_N - q_N)
    metrics = {
        "training/rollout_probs_diff_max": diff_N.max(),
        "training/rollout_probs_diff_mean": diff_N.mean(),
        "training/rollout_probs_diff_std": diff_N.std(ddof=1) if len(diff_N) > 1 else 0.0,
        "training/rollout_log_probs_diff_max": np.abs(log_ratio_N).max(),
        "training/rollout_log_probs_diff_mean": np.abs(log_ratio_N).mean(),
        "rollout_corr/kl": k1(log_ratio_N).mean(),
        "rollout_corr/k3_kl": k3(log_ratio_N).mean(),
        "rollout_corr/chi2_token": (safe_exp(log_ratio_N) ** 2).mean() - 1.0,
    }
    if p_N.std() > 0.0 and q_N.std() > 0.0:
        metrics["training/rollout_actor_probs_pearson_corr"] = np.corrcoef(p_N, q_N)[0, 1]
    return {name: float(value) for name, value in metrics.items()}


def _by_response(old_BT: Float64s, rollout_BT: Float64s, mask_BT: Mask) -> dict[str, float]:
    """Means over responses; a perplexity is exp of minus the mean log-prob of a response's tokens."""
    rows = mask_BT.any(axis=1)
    tokens_R = mask_BT.sum(axis=1)[rows]
    training_R, rollout_R = (-log_probs.sum(axis=1)[rows] / tokens_R for log_probs in (old_BT, rollout_BT))
    diff_R = training_R - rollout_R
    metrics = {
        "training_ppl": np.exp(training_R).mean(),
        "training_log_ppl": training_R.mean(),
        "rollout_ppl": np.exp(rollout_R).mean(),
        "rollout_log_ppl": rollout_R.mean(),
        "log_ppl_diff": diff_R.mean(),
        "log_ppl_abs_diff": np.abs(diff_R).mean(),
        "log_ppl_diff_max": diff_R.max(),
        "log_ppl_diff_min": diff_R.min(),
        "ppl_ratio": np.exp(diff_R).mean(),
        "chi2_seq": (safe_exp((old_BT - rollout_BT).sum(axis=1)[rows]) ** 2).mean() - 1.0,
    }
    return {f"rollout_corr/{name}": float(value) for name, value in metrics.items()}
