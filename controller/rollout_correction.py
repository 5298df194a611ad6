"""Rollout correction: weights and rejection where the rollout engine did not sample from the trainer's policy.

Two programs compute the probabilities of the same tokens with other kernels and other dtypes, so that the samples are
slightly off-policy before the first update (Liu et al., 2025, "When Speed Kills Stability"; Yao et al., 2025, "Your
Efficient RL Framework Secretly Brings You Off-Policy RL Training"). Options and metric names are verl's.

B responses, T response tokens, right-padded; N tokens inside the mask, R responses that have any.
r = trainer's probability of a sampled token / the rollout engine's. float64 inside.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from controller.disagreement import Float64s, disagreement, k1, k2, k3, safe_exp
from controller.masked import Floats, Mask
from splitppo.config import RolloutCorrectionConfig
from splitppo.config.rejection import Rejection

_ESTIMATES: Mapping[str, Callable[[Float64s], Float64s]] = {"k1": k1, "k2": k2, "k3": k3}


@dataclass(frozen=True, eq=False)
class Correction:
    """What a step's experience becomes.

    Attributes:
        kept: [B, T] bool, tokens to learn from: the mask without what was rejected.
        weights: [B, T] float32, what multiplies the policy loss of a token, 0 outside the mask; None: nothing does.
        metrics: rollout_corr/... and training/rollout_...
    """

    kept: Mask
    weights: NDArray[np.float32] | None
    metrics: dict[str, float]


def correct_rollout(
    config: RolloutCorrectionConfig, old_log_probs_BT: Floats, rollout_log_probs_BT: Floats, mask_BT: Mask
) -> Correction:
    """Weights, rejection and metrics of a batch; where nothing is configured, only metrics.

    Weights are computed, and normalised, over all tokens, also over those that are rejected.

    Args:
        config: what is weighted and rejected.
        old_log_probs_BT: [B, T], by the trainer's forward.
        rollout_log_probs_BT: [B, T], as the engine sampled.
        mask_BT: [B, T] bool, response tokens that count; without any, nothing is done.

    Raises:
        ValueError: shapes differ.
    """
    metrics = disagreement(old_log_probs_BT, rollout_log_probs_BT, mask_BT)
    old_BT, rollout_BT = (
        np.where(mask_BT, x, 0.0).astype(np.float64) for x in (old_log_probs_BT, rollout_log_probs_BT)
    )
    log_ratio_BT = old_BT - rollout_BT
    weights_BT: Float64s | None = None
    if config.rollout_is is not None:
        weights_BT, measured = importance_weights(config, log_ratio_BT, mask_BT)
        metrics |= measured
    kept_BT, measured = reject(config.rejections, log_ratio_BT, mask_BT)
    return Correction(kept_BT, None if weights_BT is None else weights_BT.astype(np.float32), metrics | measured)


def importance_weights(
    config: RolloutCorrectionConfig, log_ratio_BT: Float64s, mask_BT: Mask
) -> tuple[Float64s, dict[str, float]]:
    """Truncated importance weights min(w, threshold) (Ionides, 2008, "Truncated Importance Sampling").

    w is r of the token (`token`), or the product of r over the response, on each of its tokens (`sequence`), so that
    E_q[w f] = E_p[f] but for the truncation. With rollout_is_batch_normalize the truncated weights are divided by their
    mean over tokens (`token`) or over responses (`sequence`).

    Args:
        config: rollout_is is set.
        log_ratio_BT: [B, T], log r, 0 outside the mask.
        mask_BT: [B, T] bool.

    Returns:
        (weights [B, T], 0 outside the mask, metrics of w before the truncation).
    """
    if not mask_BT.any():
        return np.zeros(mask_BT.shape), {}
    log_w_BT = log_ratio_BT
    if config.rollout_is == "sequence":
        log_w_BT = np.broadcast_to(log_ratio_BT.sum(axis=1, keepdims=True), mask_BT.shape)
    w_BT = np.where(mask_BT, safe_exp(log_w_BT), 0.0)
    metrics = _weight_metrics(config, w_BT, mask_BT)
    weights_BT = np.minimum(w_BT, config.rollout_is_threshold)
    if config.rollout_is_batch_normalize:
        by_response = config.rollout_is == "sequence"
        factor = float((_response_means(weights_BT, mask_BT) if by_response else weights_BT[mask_BT]).mean())
        weights_BT = weights_BT / factor
        metrics["rollout_is_batch_norm_factor"] = factor
    return weights_BT, _named(metrics)


def reject(rejections: tuple[Rejection, ...], log_ratio_BT: Float64s, mask_BT: Mask) -> tuple[Mask, dict[str, float]]:
    """The tokens that pass all criteria.

    Args:
        rejections: criteria on k1 = -log r, k2 or k3: of a token, or the sum, mean or maximum over a response, of
            which all tokens are then rejected together.
        log_ratio_BT: [B, T], log r, 0 outside the mask.
        mask_BT: [B, T] bool.

    Returns:
        (kept [B, T] bool, a subset of the mask, metrics of each criterion and of all together).
    """
    if not rejections or not mask_BT.any():
        return mask_BT, {}
    metrics: dict[str, float] = {}
    kept_BT = mask_BT
    for rejection in rejections:
        statistic_BT = _statistic(rejection, log_ratio_BT, mask_BT)
        passes_BT = mask_BT & (statistic_BT <= rejection.upper)
        if rejection.lower is not None:
            passes_BT &= statistic_BT >= rejection.lower
        measured = {**_rejection_metrics(rejection, statistic_BT, mask_BT), **_masked_fractions(passes_BT, mask_BT)}
        metrics |= {f"{rejection.option}_{name}": value for name, value in measured.items()}
        kept_BT = kept_BT & passes_BT
    metrics |= _masked_fractions(kept_BT, mask_BT)
    return kept_BT, _named({f"rollout_rs_{name}": value for name, value in metrics.items()})


def _statistic(rejection: Rejection, log_ratio_BT: Float64s, mask_BT: Mask) -> Float64s:
    """[B, T], what a criterion looks at; that of a response stands on each of its tokens."""
    estimate_BT = np.where(mask_BT, _ESTIMATES[rejection.estimate](log_ratio_BT), 0.0)
    tokens_B = np.maximum(mask_BT.sum(axis=1), 1)
    match rejection.over:
        case "token":
            return estimate_BT
        case "seq_sum":
            statistic_B = estimate_BT.sum(axis=1)
        case "seq_mean":
            statistic_B = estimate_BT.sum(axis=1) / tokens_B
        case _:
            statistic_B = estimate_BT.max(axis=1)
    return np.broadcast_to(statistic_B[:, None], mask_BT.shape)


def _weight_metrics(config: RolloutCorrectionConfig, w_BT: Float64s, mask_BT: Mask) -> dict[str, float]:
    """Of the weights before truncation; `std` and the effective sample size of those in [1 / threshold, threshold]."""
    high, low = config.rollout_is_threshold, 1.0 / config.rollout_is_threshold
    w_N, w_R = w_BT[mask_BT], _response_means(w_BT, mask_BT)
    counted = w_R if config.rollout_is == "sequence" else w_N
    bounded_N = np.clip(w_N, low, high)
    return {
        "rollout_is_mean": float(w_N.mean()),
        "rollout_is_max": float(w_N.max()),
        "rollout_is_min": float(w_N.min()),
        "rollout_is_std": float(bounded_N.std()),
        "rollout_is_ratio_fraction_high": float((counted > high).mean()),
        "rollout_is_ratio_fraction_low": float((counted < low).mean()),
        "rollout_is_eff_sample_size": float(bounded_N.mean() ** 2 / (bounded_N**2).mean()),
        "rollout_is_seq_mean": float(w_R.mean()),
        "rollout_is_seq_std": _deviation(w_R),
        "rollout_is_seq_max": float(w_R.max()),
        "rollout_is_seq_min": float(w_R.min()),
        "rollout_is_seq_max_deviation": float(np.abs(w_R - 1.0).max()),
        "rollout_is_seq_fraction_high": float((w_R > high).mean()),
        "rollout_is_seq_fraction_low": float((w_R < low).mean()),
    }


def _rejection_metrics(rejection: Rejection, statistic_BT: Float64s, mask_BT: Mask) -> dict[str, float]:
    """Of one criterion's statistic, over tokens and (seq_) over responses; `std` of the statistic within its bounds."""
    low, high = -np.inf if rejection.lower is None else rejection.lower, rejection.upper
    token_N, row_R = statistic_BT[mask_BT], _response_means(statistic_BT, mask_BT)
    counted = token_N if rejection.over == "token" else row_R
    return {
        "mean": float(token_N.mean()),
        "max": float(counted.max()),
        "min": float(counted.min()),
        "std": float(np.clip(token_N, low, high).std()),
        "fraction_high": float((counted > high).mean()),
        "fraction_low": float((counted < low).mean()),
        "seq_mean": float(row_R.mean()),
        "seq_std": _deviation(row_R),
        "seq_max": float(row_R.max()),
        "seq_min": float(row_R.min()),
        "seq_max_deviation": float(np.abs(row_R).max()),
        "seq_fraction_high": float((row_R > high).mean()),
        "seq_fraction_low": float((row_R < low).mean()),
    }


def _masked_fractions(kept_BT: Mask, mask_BT: Mask) -> dict[str, float]:
    """The share of tokens that are rejected, and of responses that lose one."""
    rejected_BT = mask_BT & ~kept_BT
    return {
        "masked_fraction": float(rejected_BT.sum() / mask_BT.sum()),
        "seq_masked_fraction": float(rejected_BT.any(axis=1).sum() / mask_BT.any(axis=1).sum()),
    }


def _response_means(values_BT: Float64s, mask_BT: Mask) -> Float64s:
    """[R], means over the tokens of each response that has any."""
    rows = mask_BT.any(axis=1)
    return np.asarray(np.where(mask_BT, values_BT, 0.0)[rows].sum(axis=1) / mask_BT[rows].sum(axis=1))


def _deviation(values_R: Float64s) -> float:
    """Unbiased standard deviation; 0 of one value."""
    return float(values_R.std(ddof=1)) if len(values_R) > 1 else 0.0


def _named(metrics: Mapping[str, float]) -> dict[str, float]:
    return {f"rollout_corr/{name}": value for name, value in metrics.items()}
