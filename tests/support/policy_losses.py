"""Slow float64 references of policy losses, KL estimates, aggregation and rejection; each loops over the tokens.

A reference is a function of a row's log-probs and of the same log-probs frozen; it uses the latter where the formula
stops the gradient. Its value is the loss, and its finite differences in the first argument are the gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

LOW, HIGH, DUAL = 0.15, 0.3, 1.4
CLIP = {"clip_ratio_low": LOW, "clip_ratio_high": HIGH, "clip_ratio_c": DUAL}
SCALE = 17


@dataclass(frozen=True)
class Row:
    """A response; the gradient is taken in the log-probs `now`; `frozen` are the same numbers without a gradient."""

    now: list[float]
    frozen: list[float]
    old: list[float]
    ref: list[float]
    advantages: list[float]
    mask: list[bool]
    selected: list[bool]

    def ratio(self, t: int, *, of_frozen: bool = False) -> float:
        return math.exp((self.frozen if of_frozen else self.now)[t] - self.old[t])

    def mean(self, values: list[float]) -> float:
        """Returns the mean over the tokens that count."""
        counted = [value for value, counts in zip(values, self.mask, strict=True) if counts]
        return sum(counted) / len(counted)

    def every(self, of_token: Callable[[int], float]) -> list[float]:
        return [of_token(t) for t in range(len(self.now))]


def bounded(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


def clipped_surrogate(ratio: float, advantage: float) -> float:
    return -min(ratio * advantage, bounded(ratio, 1 - LOW, 1 + HIGH) * advantage)


def vanilla(row: Row, t: int) -> float:
    loss = clipped_surrogate(row.ratio(t), row.advantages[t])
    return min(loss, -DUAL * row.advantages[t]) if row.advantages[t] < 0 else loss


def gspo(row: Row, t: int) -> float:
    mean = row.mean([new - old for new, old in zip(row.frozen, row.old, strict=True)])
    return clipped_surrogate(math.exp(mean + row.now[t] - row.frozen[t]), row.advantages[t])


def geo_mean(row: Row, _t: int) -> float:
    advantage = row.mean(row.advantages)
    logs = []
    for new, old in zip(row.now, row.old, strict=True):
        limited = bounded(new - old, -LOW, HIGH)
        logs.append(min(new - old, limited) if advantage > 0 else max(new - old, limited))
    return -advantage * math.exp(row.mean(logs))


def cispo(row: Row, t: int) -> float:
    return -bounded(row.ratio(t, of_frozen=True), 1 - LOW, 1 + HIGH) * row.advantages[t] * row.now[t]


def sapo(row: Row, t: int) -> float:
    tau = 1.0 if row.advantages[t] > 0 else 1.05
    return -row.advantages[t] * (4 / tau) / (1 + math.exp(-tau * (row.ratio(t) - 1)))


def clip_cov(row: Row, t: int) -> float:
    return 0.0 if row.selected[t] else clipped_surrogate(row.ratio(t), row.advantages[t])


def kl_cov(row: Row, t: int) -> float:
    penalty = 0.1 * abs(row.now[t] - row.old[t]) if row.selected[t] else 0.0
    return -row.advantages[t] * row.ratio(t) + penalty


def gpg(row: Row, t: int) -> float:
    return -row.advantages[t] * row.now[t]


def dppo(row: Row, t: int, divergence: float, *, largest: float = DUAL) -> float:
    new, old = math.exp(row.frozen[t]), math.exp(row.old[t])
    rises_too_far, falls_too_far = new > old and divergence > HIGH, new < old and divergence > LOW
    return (
        0.0
        if (rises_too_far if row.advantages[t] > 0 else falls_too_far)
        else -row.advantages[t] * min(row.ratio(t, of_frozen=True), largest) * row.now[t]
    )


def dppo_tv(row: Row, t: int) -> float:
    return dppo(row, t, abs(math.exp(row.frozen[t]) - math.exp(row.old[t])))


def dppo_kl(row: Row, t: int) -> float:
    new, old = math.exp(row.frozen[t]), math.exp(row.old[t])
    return dppo(row, t, old * math.log(old / new) + (1 - old) * math.log((1 - old) / (1 - new)))


def dro(row: Row, t: int) -> float:
    return -(row.advantages[t] * row.now[t] - 0.5 * 0.1 * (row.now[t] - row.old[t]) ** 2)


def reinforce(row: Row, t: int) -> float:
    return -row.advantages[t] * row.now[t]


def reinforce_by_token(row: Row, t: int) -> float:
    return -row.advantages[t] * min(row.ratio(t, of_frozen=True), 1.3) * row.now[t]


def reinforce_by_sequence(row: Row, t: int) -> float:
    weight = math.exp(sum(row.frozen[u] - row.old[u] for u in range(len(row.now)) if row.mask[u]))
    return -row.advantages[t] * min(weight, 1.3) * row.now[t]


def reinforce_in_bounds(row: Row, t: int) -> float:
    weight = row.ratio(t, of_frozen=True)
    return -row.advantages[t] * (weight if 0.8 <= weight <= 1.3 else 0.0) * row.now[t]


# name -> (loss_mode, settings of actor.policy_loss, reference)
REFERENCES: dict[str, tuple[str, dict[str, Any], Callable[[Row, int], float]]] = {
    **{
        loss.__name__: (loss.__name__, {}, loss)
        for loss in (vanilla, gspo, geo_mean, cispo, sapo, clip_cov, kl_cov, gpg, dppo_tv, dppo_kl, dro, reinforce)
    },
    "reinforce_by_token": (
        "reinforce",
        {"reinforce_is": "token", "reinforce_is_threshold": 1.3},
        reinforce_by_token,
    ),
    "reinforce_in_bounds": (
        "reinforce",
        {"reinforce_is": "token", "reinforce_is_threshold": "0.8_1.3"},
        reinforce_in_bounds,
    ),
    "reinforce_by_sequence": (
        "reinforce",
        {"reinforce_is": "sequence", "reinforce_is_threshold": 1.3},
        reinforce_by_sequence,
    ),
}


def kl(row: Row, t: int, name: str) -> float:
    """Returns an estimate of KL(policy, reference) by Schulman; with a + its value with the gradient of k2."""
    if name.endswith("+"):
        d, frozen = row.now[t] - row.ref[t], row.frozen[t] - row.ref[t]
        return kl(Row(**{**vars(row), "now": row.frozen}), t, name[:-1]) + d**2 / 2 - frozen**2 / 2
    d = row.now[t] - row.ref[t]
    match name:
        case "kl" | "k1":
            return d
        case "abs":
            return abs(d)
        case "mse" | "k2":
            return d**2 / 2
    return bounded(math.exp(bounded(-d, -20, 20)) + bounded(d, -20, 20) - 1, -10, 10)


def aggregated(mode: str, rows: list[list[float]], masks: list[list[bool]]) -> float:
    """Returns the aggregated loss of all rows, by the definition of each mode."""
    counted = [
        [x for x, counts in zip(row, mask, strict=True) if counts] for row, mask in zip(rows, masks, strict=True)
    ]
    counted = [row for row in counted if row]
    match mode:
        case "token-mean":
            return sum(map(sum, counted)) / sum(map(len, counted))
        case "token-sum":
            return sum(map(sum, counted))
        case "seq-mean-token-sum":
            return sum(map(sum, counted)) / len(counted)
        case "seq-mean-token-mean":
            return sum(sum(row) / len(row) for row in counted) / len(counted)
    return sum(sum(row) / SCALE for row in counted) / len(counted)


def is_kept(row: Row, t: int, option: str, low: float, high: float) -> bool:
    """Returns True if a rejection option keeps a token: k1 = log q - log p, where p is the policy in training."""
    over, _, estimate = option.rpartition("_")

    def statistic(u: int) -> float:
        d = row.old[u] - row.frozen[u]
        return {"k1": d, "k2": d * d / 2, "k3": math.exp(-d) - 1 + d}[estimate]

    counted = [statistic(u) for u in range(len(row.now)) if row.mask[u]]
    match over:
        case "token":
            value = statistic(t)
        case "seq_sum":
            value = sum(counted)
        case "seq_mean":
            value = sum(counted) / len(counted)
        case _:
            value = max(counted)
    return low <= value <= high
