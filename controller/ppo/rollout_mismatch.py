"""How far the trainer's and the rollout backend's probabilities of the same sampled tokens differ, as metrics.

B responses, T response tokens, right-padded; N tokens inside the mask, R responses that have any. p is the trainer's
probability of a token, q the rollout backend's, r = p / q; exponents are clamped. float64 throughout.
"""

import numpy as np

from controller.ppo.kl import clamp_log_ratio, k1, k3
from controller.ppo.masked_stats import Float64s, Floats, Mask


def mismatch_metrics(old_log_probs_BT: Floats, rollout_log_probs_BT: Floats, mask_BT: Mask) -> dict[str, float]:
    """training/rollout_... and rollout_corr/..., in every step in which log p and log q are known, corrected or not.

    Empty without any token; ValueError if shapes differ.
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
    metrics = _by_token(old_BT[mask_BT], rollout_BT[mask_BT]) | _by_response(old_BT, rollout_BT, mask_BT)
    return {name: float(value) for name, value in metrics.items()}


def _by_token(old_N: Float64s, rollout_N: Float64s) -> dict[str, float]:
    p_N, q_N, d_N = np.exp(old_N), np.exp(rollout_N), rollout_N - old_N
    diff_N = np.abs(p_N - q_N)
    metrics = {
        "training/rollout_probs_diff_max": diff_N.max(),
        "training/rollout_probs_diff_mean": diff_N.mean(),
        "training/rollout_probs_diff_std": diff_N.std(ddof=1) if len(diff_N) > 1 else 0.0,
        "training/rollout_log_probs_diff_max": np.abs(d_N).max(),
        "training/rollout_log_probs_diff_mean": np.abs(d_N).mean(),
        "rollout_corr/kl": k1(d_N).mean(),
        "rollout_corr/k3_kl": k3(clamp_log_ratio(d_N)).mean(),
        "rollout_corr/chi2_token": (np.exp(clamp_log_ratio(-d_N)) ** 2).mean() - 1.0,
    }
    if p_N.std() > 0.0 and q_N.std() > 0.0:
        metrics["training/rollout_actor_probs_pearson_corr"] = np.corrcoef(p_N, q_N)[0, 1]
    return metrics


def _by_response(old_BT: Float64s, rollout_BT: Float64s, mask_BT: Mask) -> dict[str, float]:
    """Means over responses; a perplexity is exp of minus the mean log-prob of a response's tokens."""
    rows = mask_BT.any(axis=1)
    tokens_R = mask_BT.sum(axis=1)[rows]
    training_R, rollout_R = (-log_probs.sum(axis=1)[rows] / tokens_R for log_probs in (old_BT, rollout_BT))
    diff_R = training_R - rollout_R
    log_ratio_R = clamp_log_ratio((old_BT - rollout_BT).sum(axis=1)[rows])
    return {
        "rollout_corr/training_ppl": np.exp(training_R).mean(),
        "rollout_corr/training_log_ppl": training_R.mean(),
        "rollout_corr/rollout_ppl": np.exp(rollout_R).mean(),
        "rollout_corr/rollout_log_ppl": rollout_R.mean(),
        "rollout_corr/log_ppl_diff": diff_R.mean(),
        "rollout_corr/log_ppl_abs_diff": np.abs(diff_R).mean(),
        "rollout_corr/log_ppl_diff_max": diff_R.max(),
        "rollout_corr/log_ppl_diff_min": diff_R.min(),
        "rollout_corr/ppl_ratio": np.exp(diff_R).mean(),
        "rollout_corr/chi2_seq": (np.exp(log_ratio_R) ** 2).mean() - 1.0,
    }
