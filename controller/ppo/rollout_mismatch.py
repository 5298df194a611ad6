"""Measures how the trainer's and the rollout backend's probabilities of sampled tokens differ, as metrics.

B responses, T response tokens, right-padded; N tokens inside the mask, R responses that have any. p is the trainer's
probability of a token, q the rollout backend's, r = p / q; exponents are clamped. float64 throughout.
"""

from collections import defaultdict

import numpy as np

from controller.ppo.kl import clamp_log_ratio, k1, k3
from controller.ppo.masked_stats import Float64s, Floats, Mask


def mismatch_metrics(old_log_probs_BT: Floats, rollout_log_probs_BT: Floats, mask_BT: Mask) -> dict[str, float]:
    """Compares the trainer's and the rollout backend's log-probs of one whole batch, and returns metrics by name."""
    mismatch = Mismatch()
    mismatch.add(old_log_probs_BT, rollout_log_probs_BT, mask_BT)
    return mismatch.metrics()


class Mismatch:
    """Accumulates the differences between the trainer's and the rollout backend's token probabilities in a step.

    Rows may come in several pieces. Only a few numbers of each response are kept. The metrics are training/rollout_...
    and rollout_corr/...
    """

    def __init__(self) -> None:
        self._num_tokens = 0
        self._sums: defaultdict[str, float] = defaultdict(float)
        self._largest: defaultdict[str, float] = defaultdict(float)
        self._means_3 = np.zeros(3)  # the means of |p - q|, p and q
        self._moments_33 = np.zeros((3, 3))  # sums of products of their deviations
        self._responses: list[tuple[Float64s, Float64s, Float64s]] = []

    def add(self, old_log_probs_BT: Floats, rollout_log_probs_BT: Floats, mask_BT: Mask) -> None:
        """Adds the log-probs of further responses, [B, T], to the statistics; ValueError if shapes differ."""
        if not old_log_probs_BT.shape == rollout_log_probs_BT.shape == mask_BT.shape:
            raise ValueError(
                f"log-probs and mask must have the same shape, got {old_log_probs_BT.shape},"
                f" {rollout_log_probs_BT.shape} and {mask_BT.shape}"
            )
        if not mask_BT.any():
            return
        old_BT = np.where(mask_BT, old_log_probs_BT, 0.0).astype(np.float64)
        rollout_BT = np.where(mask_BT, rollout_log_probs_BT, 0.0).astype(np.float64)
        self._add_tokens(old_BT[mask_BT], rollout_BT[mask_BT])
        rows = mask_BT.any(axis=1)
        tokens_R = mask_BT.sum(axis=1)[rows].astype(np.float64)
        self._responses.append((old_BT.sum(axis=1)[rows], rollout_BT.sum(axis=1)[rows], tokens_R))

    def _add_tokens(self, old_N: Float64s, rollout_N: Float64s) -> None:
        """Adds further tokens to sums and maxima, given the trainer's and the rollout backend's log-probs, [N] each.

        The KL estimators k1 and k3 are of q to p, with log q - log p; the squared ratio is (p / q)^2.
        """
        p_N = np.exp(old_N)
        q_N = np.exp(rollout_N)
        minus_log_ratio_N = rollout_N - old_N  # log(q / p) = -log r
        diff_N = np.abs(p_N - q_N)
        abs_N = np.abs(minus_log_ratio_N)
        self._largest["probs"] = max(self._largest["probs"], diff_N.max())
        self._largest["log_probs"] = max(self._largest["log_probs"], abs_N.max())
        self._sums["abs"] += abs_N.sum()
        self._sums["k1"] += k1(minus_log_ratio_N).sum()
        self._sums["k3"] += k3(clamp_log_ratio(minus_log_ratio_N)).sum()
        self._sums["squared_ratio"] += (np.exp(clamp_log_ratio(-minus_log_ratio_N)) ** 2).sum()
        self._add_moments(np.stack([diff_N, p_N, q_N]))

    def _add_moments(self, values_3N: Float64s) -> None:
        """Adds |p - q|, p and q of further tokens, [3, N], to means and products of deviations (Chan et al., 1983)."""
        before = self._num_tokens
        added = values_3N.shape[1]
        means_3 = values_3N.mean(axis=1)
        deviations_3N = values_3N - means_3[:, None]
        shift_3 = means_3 - self._means_3
        self._moments_33 += deviations_3N @ deviations_3N.T
        self._moments_33 += np.outer(shift_3, shift_3) * before * added / (before + added)
        self._means_3 += shift_3 * added / (before + added)
        self._num_tokens += added

    def metrics(self) -> dict[str, float]:
        """Returns the metrics of all responses added so far, by name; no metrics without any token."""
        if not self._num_tokens:
            return {}
        old_R, rollout_R, tokens_R = map(np.concatenate, zip(*self._responses, strict=True))
        metrics = self._by_token() | _by_response(old_R, rollout_R, tokens_R)
        return {name: float(value) for name, value in metrics.items()}

    def _by_token(self) -> dict[str, float]:
        """Returns the metrics that are means, maxima or moments over all tokens.

        Indices of means and moments: 0 for |p - q|, 1 for p, 2 for q. The standard deviation of a single token is 0.
        Pearson's correlation of p and q is left out if one of them is the same for all tokens.
        """
        num_tokens = self._num_tokens
        means = self._means_3
        moments = self._moments_33
        metrics = {
            "training/rollout_probs_diff_max": self._largest["probs"],
            "training/rollout_probs_diff_mean": means[0],
            "training/rollout_probs_diff_std": np.sqrt(moments[0, 0] / (num_tokens - 1)) if num_tokens > 1 else 0.0,
            "training/rollout_log_probs_diff_max": self._largest["log_probs"],
            "training/rollout_log_probs_diff_mean": self._sums["abs"] / num_tokens,
            "rollout_corr/kl": self._sums["k1"] / num_tokens,
            "rollout_corr/k3_kl": self._sums["k3"] / num_tokens,
            "rollout_corr/chi2_token": self._sums["squared_ratio"] / num_tokens - 1.0,
        }
        if moments[1, 1] > 0.0 and moments[2, 2] > 0.0:
            correlation = moments[1, 2] / np.sqrt(moments[1, 1] * moments[2, 2])
            metrics["training/rollout_actor_probs_pearson_corr"] = np.clip(correlation, -1.0, 1.0)
        return metrics


def _by_response(old_R: Float64s, rollout_R: Float64s, tokens_R: Float64s) -> dict[str, float]:
    """Computes metrics that are means over responses, from sums of log-probs. A perplexity is exp(-mean log-prob)."""
    training_R = -old_R / tokens_R
    sampled_R = -rollout_R / tokens_R
    diff_R = training_R - sampled_R
    log_ratio_R = clamp_log_ratio(old_R - rollout_R)
    return {
        "rollout_corr/training_ppl": np.exp(training_R).mean(),
        "rollout_corr/training_log_ppl": training_R.mean(),
        "rollout_corr/rollout_ppl": np.exp(sampled_R).mean(),
        "rollout_corr/rollout_log_ppl": sampled_R.mean(),
        "rollout_corr/log_ppl_diff": diff_R.mean(),
        "rollout_corr/log_ppl_abs_diff": np.abs(diff_R).mean(),
        "rollout_corr/log_ppl_diff_max": diff_R.max(),
        "rollout_corr/log_ppl_diff_min": diff_R.min(),
        "rollout_corr/ppl_ratio": np.exp(diff_R).mean(),
        "rollout_corr/chi2_seq": (np.exp(log_ratio_R) ** 2).mean() - 1.0,
    }
