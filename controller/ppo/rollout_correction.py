"""Corrects for the difference between the trainer's and the rollout backend's probabilities of sampled tokens.

The correction weights tokens or rejects them. The trainer and the rollout backend compute the probabilities of the same
tokens with different kernels and dtypes, so that the samples are slightly off-policy before the first update (Liu et
al., 2025, "When Speed Kills Stability"; Yao et al., 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy
RL Training"). Options and metric names are verl's.

B responses, T response tokens, right-padded; N tokens inside the mask, R responses that have any.
r = p / q, the trainer's probability of a sampled token over the rollout backend's. float64 inside.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from controller.ppo.kl import KL_ESTIMATORS, clamp_log_ratio
from controller.ppo.masked_stats import Float32s, Float64s, Floats, Mask, blocks
from controller.ppo.rollout_mismatch import Mismatch, mismatch_metrics
from splitppo.batch import Batch, Column
from splitppo.config.sections.algorithm import RolloutCorrectionConfig
from splitppo.config.subsections.rejection import Rejection

# Padded tokens that are measured at a time.
_TOKENS = 1 << 17


@dataclass(frozen=True, eq=False)
class Correction:
    """The result of rollout correction: which tokens to learn from, their weights, and metrics.

    Attributes:
        learned: [B, T] bool, the tokens to learn from: the mask without rejected tokens.
        weights: [B, T] float32, the factor of each token's policy loss, 0 outside the mask; None without weights.
        metrics: rollout_corr/... and training/rollout_...
    """

    learned: Mask
    weights: Float32s | None
    metrics: Mapping[str, float]


def correct_rollouts(
    config: RolloutCorrectionConfig, rollouts: Batch, response_mask: Column
) -> tuple[Column, Column | None, Mapping[str, float]]:
    """Applies rollout correction to ragged rollouts and returns (tokens to learn from, token weights, metrics).

    If correction is off, all tokens are learned, without weights. Rollouts with both log-probs have metrics, also if
    correction is off.

    Raises:
        ValueError: the correction needs log-probs that the rollouts do not have.
    """
    if not ("old_log_probs" in rollouts and "rollout_log_probs" in rollouts):
        if config.is_active:
            raise ValueError("rollout correction needs old_log_probs and rollout_log_probs")
        return response_mask, None, {}
    columns = rollouts["old_log_probs"], rollouts["rollout_log_probs"], response_mask
    if config.is_active:
        correction = correct_rollout(config, *(column.pad() for column in columns))
        weights = None if correction.weights is None else response_mask.unpad(correction.weights)
        return response_mask.unpad(correction.learned), weights, correction.metrics
    mismatch = Mismatch()
    for start, stop in blocks(response_mask.lengths, _TOKENS):
        mismatch.add(*(column.between(start, stop).pad() for column in columns))
    return response_mask, None, mismatch.metrics()


def correct_rollout(
    config: RolloutCorrectionConfig, old_log_probs_BT: Floats, rollout_log_probs_BT: Floats, mask_BT: Mask
) -> Correction:
    """Computes token weights, rejected tokens and metrics of a padded batch, from log p and log q.

    p: the trainer's probability of a token, q: the rollout backend's. Weights are computed and normalised over all
    tokens, rejected tokens included. There are no metrics without any token.
    """
    metrics = mismatch_metrics(old_log_probs_BT, rollout_log_probs_BT, mask_BT)
    log_ratio_BT = np.where(mask_BT, old_log_probs_BT.astype(np.float64) - rollout_log_probs_BT, 0.0)
    weights_BT: Float32s | None = None
    if config.rollout_is is not None:
        weights_BT, weight_metrics = importance_weights(config, log_ratio_BT, mask_BT)
        metrics |= weight_metrics
    learned_BT, rejection_metrics = reject(config.rejections, -log_ratio_BT, mask_BT)
    return Correction(learned_BT, weights_BT, metrics | rejection_metrics)


def importance_weights(
    config: RolloutCorrectionConfig, log_ratio_BT: Float64s, mask_BT: Mask
) -> tuple[Float32s, dict[str, float]]:
    """Computes truncated importance weights min(w, threshold) (Ionides, 2008, "Truncated Importance Sampling").

        token:    w_t = p_t / q_t
        sequence: w_t = prod_s p_s / q_s, over the response's tokens s

    so that E_q[w f] = E_p[f] except for the truncation. With two bounds, a weight outside of them is 0 (Ling Team,
    2025, "IcePop"). With rollout_is_batch_normalize, these weights are divided by their mean over tokens (`token`) or
    over responses (`sequence`). log r is 0 outside the mask.

    Returns:
        (weights [B, T] float32, 0 outside the mask, metrics). The metrics are those of verl since 0.8. They describe
        the weights before the division. The shares beyond the bounds, and the extremes of `sequence`, describe w.
    """
    if not mask_BT.any():
        return np.zeros(mask_BT.shape, np.float32), {}
    by_response = config.rollout_is == "sequence"
    lower, upper = config.weight_bounds
    log_w_BT = log_ratio_BT.sum(axis=1, keepdims=True) if by_response else log_ratio_BT
    w_BT = np.where(mask_BT, np.exp(clamp_log_ratio(log_w_BT)), 0.0)
    is_outside_BT = mask_BT & (w_BT > upper) if lower is None else mask_BT & ((w_BT < lower) | (w_BT > upper))
    weights_BT = np.where(is_outside_BT, upper if lower is None else 0.0, w_BT)
    metrics = _weight_metrics(w_BT, weights_BT, mask_BT, config.weight_bounds, by_response=by_response)
    if lower is not None:
        metrics["oob_ratio"] = float(is_outside_BT[mask_BT].mean())
    if config.rollout_is_batch_normalize:
        weights = _response_means(weights_BT, mask_BT) if by_response else weights_BT[mask_BT]
        factor = float(weights.mean()) or 1.0  # if all weights are 0, they stay 0
        weights_BT = weights_BT / factor
        metrics["batch_norm_factor"] = factor
    return weights_BT.astype(np.float32), _named("rollout_is", metrics)


def _weight_metrics(
    w_BT: Float64s,
    weights_BT: Float64s,
    mask_BT: Mask,
    bounds: tuple[float | None, float],
    *,
    by_response: bool,
) -> dict[str, float]:
    """Computes the metrics of importance weights as verl does: partly of the ratios w, partly of the truncated weights.

    Of w are the shares beyond the bounds, and with `by_response` the extremes; all others are of the weights. Without a
    lower bound, a w below 1 / upper counts as low. The effective sample size is mean(weight)^2 / mean(weight^2), from 0
    to 1.
    """
    lower, upper = bounds
    low = 1.0 / upper if lower is None else lower
    raw = _spread(w_BT, mask_BT, low=low, high=upper, centre=1.0, by_response=by_response)
    metrics = _spread(weights_BT, mask_BT, low=0.0, high=upper, centre=1.0, by_response=by_response)
    metrics |= {name: raw[name] for name in ("seq_fraction_high", "seq_fraction_low")}
    metrics |= {name: raw[name] for name in ("max", "min")} if by_response else {}
    for share in ("fraction_high", "fraction_low"):
        del metrics[share]
        metrics[f"ratio_{share}"] = raw[share]
    weights_N = weights_BT[mask_BT]
    mean_square = float((weights_N**2).mean())
    metrics["eff_sample_size"] = float(weights_N.mean() ** 2 / mean_square) if mean_square else 0.0
    return metrics


def reject(rejections: tuple[Rejection, ...], d_BT: Float64s, mask_BT: Mask) -> tuple[Mask, dict[str, float]]:
    """Rejects tokens whose KL statistic is out of bounds; returns (mask of the tokens that pass all rules, metrics).

    A rule has the form lower <= statistic <= upper. The statistic is k1, k2 or k3 (controller/ppo/kl.py) of a token, or
    their sum, mean or maximum over a response. A statistic of a response rejects all of its tokens together.
    d = log q - log p is 0 outside the mask, and clamped for k2 and k3.
    """
    if not rejections or not mask_BT.any():
        return mask_BT, {}
    metrics: dict[str, float] = {}
    learned_BT = mask_BT
    for rejection in rejections:
        low = -np.inf if rejection.lower is None else rejection.lower
        high = rejection.upper
        statistic_BT = _statistic(rejection, d_BT, mask_BT)
        by_response = rejection.over != "token"
        passes_BT = mask_BT & (low <= statistic_BT) & (statistic_BT <= high)
        spread = _spread(statistic_BT, mask_BT, low=low, high=high, centre=0.0, by_response=by_response)
        metrics |= _named(f"rollout_rs_{rejection.option}", spread | _masked_fractions(passes_BT, mask_BT))
        learned_BT = learned_BT & passes_BT
    return learned_BT, metrics | _named("rollout_rs", _masked_fractions(learned_BT, mask_BT))


def _statistic(rejection: Rejection, d_BT: Float64s, mask_BT: Mask) -> Float64s:
    """Computes the KL statistic of a rejection rule, [B, T]; one over a response is repeated on all of its tokens."""
    d_BT = d_BT if rejection.estimate == "k1" else clamp_log_ratio(d_BT)
    estimate_BT = np.where(mask_BT, KL_ESTIMATORS[rejection.estimate](d_BT), 0.0)
    if rejection.over == "token":
        return estimate_BT
    if rejection.over == "seq_max":
        statistic_B = np.where(mask_BT, estimate_BT, -np.inf).max(axis=1)
        statistic_B[~mask_BT.any(axis=1)] = 0.0
    else:
        statistic_B = estimate_BT.sum(axis=1)
    if rejection.over == "seq_mean":
        statistic_B /= np.maximum(mask_BT.sum(axis=1), 1)
    return np.broadcast_to(statistic_B[:, None], mask_BT.shape)


def _spread(
    values_BT: Float64s, mask_BT: Mask, *, low: float, high: float, centre: float, by_response: bool
) -> dict[str, float]:
    """Returns mean, extremes, deviation and shares beyond bounds of a weight or statistic, for the metrics.

    The figures are over tokens and, with the prefix seq_, over the means of responses. `std` is the deviation of the
    tokens' values, clipped to [low, high]. With `by_response`, the extremes and the shares beyond the bounds are those
    of responses.
    """
    values_N = values_BT[mask_BT]
    values_R = _response_means(values_BT, mask_BT)
    counted = values_R if by_response else values_N
    metrics = {
        "mean": values_N.mean(),
        "max": counted.max(),
        "min": counted.min(),
        "std": np.clip(values_N, low, high).std(),
        "fraction_high": (counted > high).mean(),
        "fraction_low": (counted < low).mean(),
        "seq_mean": values_R.mean(),
        "seq_std": values_R.std(ddof=1) if len(values_R) > 1 else 0.0,
        "seq_max": values_R.max(),
        "seq_min": values_R.min(),
        "seq_max_deviation": np.abs(values_R - centre).max(),
        "seq_fraction_high": (values_R > high).mean(),
        "seq_fraction_low": (values_R < low).mean(),
    }
    return {name: float(value) for name, value in metrics.items()}


def _masked_fractions(learned_BT: Mask, mask_BT: Mask) -> dict[str, float]:
    """Returns two metrics: the share of tokens that are rejected, and of responses that lose a token."""
    rejected_BT = mask_BT & ~learned_BT
    return {
        "masked_fraction": float(rejected_BT.sum() / mask_BT.sum()),
        "seq_masked_fraction": float(rejected_BT.any(axis=1).sum() / mask_BT.any(axis=1).sum()),
    }


def _response_means(values_BT: Float64s, mask_BT: Mask) -> Float64s:
    """Averages token values per response, over the responses that have any token: [R]."""
    rows = mask_BT.any(axis=1)
    return np.asarray(np.where(mask_BT, values_BT, 0.0)[rows].sum(axis=1) / mask_BT[rows].sum(axis=1))


def _named(prefix: str, metrics: Mapping[str, float]) -> dict[str, float]:
    return {f"rollout_corr/{prefix}_{name}": value for name, value in metrics.items()}
