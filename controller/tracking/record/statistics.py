"""Computes what the footer of a step's record says about all tokens that are learned from, recorded or not."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from controller.ppo.masked_stats import Float64s, Mask
from controller.tracking.record.step_tokens import StepTokens
from controller.tracking.step_metrics import explained_share
from splitppo.run_folder.histogram import histogram, short

_NUM_POSITIONS = 16
_NUM_LEVELS = 10
_DIGITS_OF_VALUE = 6
_POSITIONED = {"value": "value", "ret": "ret", "advantage": "advantage"}
_POSITIONED |= {"log_ratio_ref": "kl", "log_ratio_rollout": "mismatch"}
# Of the interval: the normal distribution's 97.5 % quantile, and limits for a step whose error is that of one response.
_OF_NORMAL = 1.96
_LEAST_SHARE = 1e-9
_MOST_SHIFT = 2.0


def step_statistics(tokens: StepTokens, scores_B: NDArray[Any]) -> Any:
    """Computes histograms, means by position, and how well the critic's values agree with the returns.

    Without values there are no entries about them.
    """
    learned = tokens.learned
    lists: dict[str, NDArray[Any] | None]
    lists = {name: tokens.lists.get(name) for name in ("value", "ret", "advantage", "reward", "old")}
    lists |= {f"log_ratio_{name}": tokens.difference("old", name) for name in ("ref", "rollout")}
    values: dict[str, NDArray[Any]] = {name: those[learned] for name, those in lists.items() if those is not None}
    shown = {**values, "length": tokens.lengths, "score": scores_B}
    histograms = {name: histogram(those) for name, those in shown.items()}
    statistics: dict[str, Any] = {
        "histograms": {name: found for name, found in histograms.items() if found},
        "by_position": _by_position(tokens, values),
        "lengths": dict(zip(("p10", "p50", "p90"), np.quantile(tokens.lengths, (0.1, 0.5, 0.9)).tolist(), strict=True)),
    }
    if "value" in tokens.lists and learned.any():
        statistics["calibration"] = _calibration(values["value"], values["ret"])
        statistics["explained_variance"] = explained_variance(tokens)
        statistics["auc_first_value"] = auc(tokens.numbers["value_first"], scores_B > scores_B.mean())
    return statistics


def _by_position(tokens: StepTokens, values: Mapping[str, NDArray[Any]]) -> dict[str, Any]:
    """Averages numbers of tokens by where their middles lie in the response; null for a sixteenth without one.

    `values` has the numbers of the tokens that are learned from. The middle of token t of a response of T tokens lies
    at (t + 1/2) / T.
    """
    learned = tokens.learned
    places = tokens.places[learned]
    lengths = tokens.lengths[tokens.row_of[learned]]
    bins = (2 * places + 1) * _NUM_POSITIONS // (2 * lengths)
    count = np.bincount(bins, minlength=_NUM_POSITIONS)

    def mean(values_N: NDArray[Any]) -> Float64s:
        return np.asarray(np.bincount(bins, values_N, _NUM_POSITIONS) / np.where(count, count, np.nan))

    averaged = {_POSITIONED[name]: values_N for name, values_N in values.items() if name in _POSITIONED}
    means = {name: mean(np.abs(values_N) if name == "mismatch" else values_N) for name, values_N in averaged.items()}
    if "value" in averaged:
        residual = _spread(mean, averaged["ret"] - averaged["value"])
        means["ev"] = explained_share(residual, _spread(mean, averaged["ret"]))
    rows = {name: [None if np.isnan(value) else short(value) for value in curve] for name, curve in means.items()}
    return {"edges": np.linspace(0.0, 1.0, _NUM_POSITIONS + 1).tolist(), "count": count.tolist(), **rows}


def _spread(mean: Any, values_N: NDArray[Any]) -> Float64s:
    """Returns the variance of token values by position, mean(x^2) - mean(x)^2; `mean` averages by position."""
    centred = values_N.astype(np.float64) - values_N.mean(dtype=np.float64) if len(values_N) else values_N
    return np.asarray(mean(centred**2) - mean(centred) ** 2)


def _calibration(values_N: NDArray[Any], returns_N: NDArray[Any]) -> dict[str, list[float]]:
    """Divides tokens by their values into ten parts of equal count; returns mean value and mean return of each."""
    order = np.argsort(values_N)
    parts = [part for part in np.array_split(order, _NUM_LEVELS) if len(part)]
    edges = [float(values_N[part[0]]) for part in parts] + [float(values_N[order[-1]])]
    value = [float(values_N[part].mean(dtype=np.float64)) for part in parts]
    ret = [float(returns_N[part].mean(dtype=np.float64)) for part in parts]
    return {"edges": edges, "value": value, "ret": ret, "count": [len(part) for part in parts]}


def explained_variance(tokens: StepTokens) -> dict[str, float]:
    """Computes the explained variance of the values, with standard error and 95 % interval by a jackknife.

    It leaves out one response after the other, because the tokens of a response belong together. The interval is one
    of log(1 - explained variance), which is distributed almost normally:

        shift_i = log((1 - ev without response i) / (1 - ev))      error = sqrt((n - 1) var(shift))
        1 - (1 - ev) exp(+-1.96 error)                             the interval, for n responses

    All `ev` follow from sums by response (`_ev_of`), so that leaving out a response is a subtraction. A shift is
    clipped, lest a single response decide.
    """
    learned = tokens.learned
    returns_N = tokens.lists["ret"].astype(np.float64)
    columns = [learned.astype(np.float64)]
    for values_N in (returns_N - tokens.lists["value"], returns_N):
        centred = np.where(learned, values_N - values_N[learned].mean(), 0.0)
        columns += [centred, centred**2]
    sums_KB = np.stack([tokens.sums(column) for column in columns])
    sums_KB = sums_KB[:, sums_KB[0] > 0]
    total_K = sums_KB.sum(axis=1)
    num_rows = sums_KB.shape[1]
    value = float(_ev_of(total_K))
    share = max(1.0 - value, _LEAST_SHARE)
    with np.errstate(invalid="ignore", divide="ignore"):  # without the only response no token is left
        shares_B = np.fmax(1.0 - _ev_of(total_K[:, None] - sums_KB), _LEAST_SHARE)
    shifts_B = np.clip(np.log(shares_B / share), -_MOST_SHIFT, _MOST_SHIFT)
    error = float(np.sqrt((num_rows - 1) * shifts_B.var()))
    low = 1.0 - (1.0 - value) * math.exp(_OF_NORMAL * error)
    high = 1.0 - (1.0 - value) * math.exp(-_OF_NORMAL * error)
    return {"value": value, "se": (1.0 - value) * error, "low": low, "high": high}


def _ev_of(sums_K: Float64s) -> Float64s:
    """Computes the explained variance from count, and sum and sum of squares of residuals and returns."""
    count, residual, residual_2, ret, ret_2 = sums_K
    share = explained_share(residual_2 / count - (residual / count) ** 2, ret_2 / count - (ret / count) ** 2)
    return np.asarray(share, np.float64)


def auc(values_B: NDArray[Any], is_high_B: Mask) -> float | None:
    """Computes how often a response with a high score has a larger value than one with a low score; ties count half.

    Values that differ by less than rounding are ties.

    Returns None if all scores are alike.
    """
    known = np.isfinite(values_B)
    values_B = values_B.round(_DIGITS_OF_VALUE)
    high = values_B[known & is_high_B]
    low = np.sort(values_B[known & ~is_high_B])
    if not len(high) or not len(low):
        return None
    below = np.searchsorted(low, high, "left") + np.searchsorted(low, high, "right")
    return float(below.mean() / (2 * len(low)))
