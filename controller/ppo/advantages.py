"""Advantage estimators: token rewards in, advantages and returns out.

B sequences (prompts x samples), T response tokens, right-padded; a row may be empty and a mask may have holes (tool
output), which are bridged: "the next token" is the next one inside the mask.
Arrays come in and go out as float32, masks as bool; the arithmetic is float64. Results are zero outside the mask.
r_t is the reward of token t, s the sum of a response's rewards. Returns are the advantages, but for GAE's.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from controller.ppo.masked_stats import Float32s, Float64s, Floats, Mask, masked_sum, masked_whiten
from splitppo.config import AlgorithmConfig

Integers = NDArray[np.integer[Any]]
AdvantagesAndReturns = tuple[Float32s, Float32s]


def gae(rewards_BT: Float32s, values_BT: Float32s, mask_BT: Mask, *, gamma: float, lam: float) -> AdvantagesAndReturns:
    """Generalised advantage estimation over response tokens (Schulman et al., 2016, eq. 16), not whitened.

        delta_t  = r_t + gamma * V_{t+1} - V_t
        A_t      = delta_t + gamma * lam * A_{t+1}
        return_t = A_t + V_t

    with V, the value of the state before a token, and A zero after the last one; gamma and lam in [0, 1].
    """
    _check(rewards_BT, mask_BT, gamma, lam)
    if values_BT.shape != mask_BT.shape:
        raise ValueError(f"values must have the shape of the rewards, {mask_BT.shape}, got {values_BT.shape}")
    # The masked tokens of each row, side by side at its beginning; zeros after them.
    dense_BT = np.arange(mask_BT.shape[1]) < mask_BT.sum(axis=1)[:, None]
    deltas_BT, dense_values_BT = np.zeros(mask_BT.shape), np.zeros(mask_BT.shape)
    deltas_BT[dense_BT], dense_values_BT[dense_BT] = rewards_BT[mask_BT], values_BT[mask_BT]
    deltas_BT[:, :-1] += gamma * dense_values_BT[:, 1:]
    deltas_BT -= dense_values_BT
    # One column after the other, from the last: each one is contiguous in this layout.
    advantages_TB = np.ascontiguousarray(deltas_BT.T)
    decay = gamma * lam
    for t in reversed(range(len(advantages_TB) - 1)):
        advantages_TB[t] += decay * advantages_TB[t + 1]
    advantages_BT = np.zeros(mask_BT.shape)
    advantages_BT[mask_BT] = advantages_TB.T[dense_BT]
    return _float32(advantages_BT, mask_BT), _float32(advantages_BT + values_BT, mask_BT)


def grpo(
    rewards_BT: Float32s, groups_B: Integers, mask_BT: Mask, *, norm_adv_by_std: bool, scored_BT: Mask | None = None
) -> AdvantagesAndReturns:
    """Group-relative advantage (Shao et al., 2024), the same on every token.

        A = (s - mean(s of the prompt's samples)) / (std(s of the prompt's samples) + 1e-6)

    Args:
        rewards_BT: whose sum over `scored_BT` is s.
        groups_B: equal for samples of one prompt. A group of one has mean 0 and standard deviation 1.
        mask_BT: tokens that get an advantage.
        norm_adv_by_std: off leaves out the division (Dr. GRPO; Liu et al., 2025).
        scored_BT: default: mask_BT. What is not learned from still counts in its group's mean.
    """
    scores_B, mean_B, count_B, group_B = _scores_and_group_means(rewards_BT, groups_B, mask_BT, scored_BT)
    centred_B = scores_B - mean_B
    variance_G = np.bincount(group_B, centred_B**2) / np.maximum(np.bincount(group_B) - 1, 1)
    std_B = np.where(count_B > 1, np.sqrt(variance_G[group_B]), 1.0)
    return _on_every_token(centred_B / (std_B + 1e-6) if norm_adv_by_std else centred_B, mask_BT)


def rloo(
    rewards_BT: Float32s, groups_B: Integers, mask_BT: Mask, *, scored_BT: Mask | None = None
) -> AdvantagesAndReturns:
    """Leave-one-out baseline (Ahmadian et al., 2024), the same on every token; arguments as in `grpo`.

        A = s - mean(s of the prompt's other samples) = (s - mean(s of all n)) * n / (n - 1)

    A group of one has no others: its advantage is s.
    """
    scores_B, mean_B, count_B, _ = _scores_and_group_means(rewards_BT, groups_B, mask_BT, scored_BT)
    return _on_every_token((scores_B - mean_B) * count_B / np.maximum(count_B - 1, 1), mask_BT)


def reinforce_plus_plus(rewards_BT: Float32s, mask_BT: Mask, *, gamma: float) -> AdvantagesAndReturns:
    """REINFORCE++ (Hu, 2025): the discounted reward-to-go r_t + gamma * A_{t+1}, GAE without values, not whitened."""
    return gae(rewards_BT, np.zeros_like(rewards_BT), mask_BT, gamma=gamma, lam=1.0)


def reinforce_plus_plus_baseline(
    rewards_BT: Float32s, groups_B: Integers, mask_BT: Mask, *, scored_BT: Mask | None = None
) -> AdvantagesAndReturns:
    """REINFORCE++-baseline (Hu, 2025): A = s - mean(s of the prompt's samples), not whitened; `grpo` without std."""
    return grpo(rewards_BT, groups_B, mask_BT, norm_adv_by_std=False, scored_BT=scored_BT)


@dataclass(frozen=True)
class Estimator:
    """A function of rewards_BT, mask_BT and `inputs`, all by keyword; `whiten` its advantages, over the batch.

    Rows of different prompts do not meet in it, so that a batch may come to it in pieces.
    """

    function: Callable[..., AdvantagesAndReturns]
    inputs: tuple[str, ...]
    whiten: bool = False


# By the names of splitppo/config/algorithm.py, where `needs_values` is whether "values_BT" is an input.
ESTIMATORS: Mapping[str, Estimator] = {
    "gae": Estimator(gae, ("values_BT", "gamma", "lam"), whiten=True),
    "grpo": Estimator(grpo, ("groups_B", "norm_adv_by_std", "scored_BT")),
    "rloo": Estimator(rloo, ("groups_B", "scored_BT")),
    "reinforce_plus_plus": Estimator(reinforce_plus_plus, ("gamma",), whiten=True),
    "reinforce_plus_plus_baseline": Estimator(reinforce_plus_plus_baseline, ("groups_B", "scored_BT"), whiten=True),
}


def compute_advantages(
    algorithm: AlgorithmConfig,
    rewards_BT: Float32s,
    mask_BT: Mask,
    *,
    groups_B: Integers,
    values_BT: Float32s | None = None,
    scored_BT: Mask | None = None,
) -> AdvantagesAndReturns:
    """(advantages, returns) by `algorithm.adv_estimator`, not yet whitened; rewards include the KL penalty.

    ValueError if an argument does not fit or is missing.
    """
    estimator = ESTIMATORS[algorithm.adv_estimator]
    if values_BT is None and "values_BT" in estimator.inputs:
        raise ValueError(f"estimator {algorithm.adv_estimator!r} needs values")
    given = {
        "groups_B": groups_B,
        "values_BT": values_BT,
        "scored_BT": scored_BT,
        "gamma": algorithm.gamma,
        "lam": algorithm.lam,
        "norm_adv_by_std": algorithm.norm_adv_by_std_in_grpo,
    }
    inputs = {name: given[name] for name in estimator.inputs}
    return estimator.function(rewards_BT=rewards_BT, mask_BT=mask_BT, **inputs)


def whiten_advantages(algorithm: AlgorithmConfig, advantages: Floats, mask: Mask) -> Floats:
    """The advantages of a whole batch, of any shape, ready for the loss: whitened where the estimator says so.

    ValueError if fewer than two tokens are there to whiten.
    """
    return masked_whiten(advantages, mask) if ESTIMATORS[algorithm.adv_estimator].whiten else advantages


def _scores_and_group_means(
    rewards_BT: Float32s, groups_B: Integers, mask_BT: Mask, scored_BT: Mask | None
) -> tuple[Float64s, Float64s, Integers, Integers]:
    """Per row: its score, its group's mean score (0 in a group of one), its group's size and index."""
    _check(rewards_BT, mask_BT)
    if groups_B.shape != mask_BT.shape[:1]:
        raise ValueError(f"groups must have shape {mask_BT.shape[:1]}, got {groups_B.shape}")
    scores_B = masked_sum(rewards_BT, mask_BT if scored_BT is None else scored_BT, axis=1)
    _, group_B, count_G = np.unique(groups_B, return_inverse=True, return_counts=True)
    mean_G = np.bincount(group_B, scores_B, minlength=len(count_G)) / count_G
    count_B = count_G[group_B]
    return scores_B, np.where(count_B > 1, mean_G[group_B], 0.0), count_B, group_B


def _on_every_token(advantage_B: Float64s, mask_BT: Mask) -> AdvantagesAndReturns:
    advantages_BT = _float32(np.broadcast_to(advantage_B[:, None], mask_BT.shape), mask_BT)
    return advantages_BT, advantages_BT.copy()


def _float32(values_BT: Floats, mask_BT: Mask) -> Float32s:
    return np.where(mask_BT, values_BT, 0.0).astype(np.float32)


def _check(rewards_BT: Float32s, mask_BT: Mask, *factors: float) -> None:
    if mask_BT.dtype != np.bool_ or mask_BT.ndim != 2:
        raise ValueError(f"the mask must be [B, T] bool, got {mask_BT.dtype} with shape {mask_BT.shape}")
    if rewards_BT.shape != mask_BT.shape:
        raise ValueError(f"rewards must have the shape of the mask, {mask_BT.shape}, got {rewards_BT.shape}")
    if not all(0.0 <= factor <= 1.0 for factor in factors):
        raise ValueError(f"gamma and lam must lie in [0, 1], got {factors}")
