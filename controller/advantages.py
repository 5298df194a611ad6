"""Advantage estimators: token rewards in, advantages and returns out.

B sequences (prompts x samples), T response tokens, right-padded; a row may be empty and a mask may have holes.
Arrays come in and go out as float32; the arithmetic is float64. Results are zero outside the mask.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from controller.masked import masked_sum, masked_whiten
from splitppo.config import ConfigError

Float32s = NDArray[np.float32]
Mask = NDArray[np.bool_]
AdvantagesAndReturns = tuple[Float32s, Float32s]


def gae(rewards_BT: Float32s, values_BT: Float32s, mask_BT: Mask, *, gamma: float, lam: float) -> AdvantagesAndReturns:
    """Generalised advantage estimation over response tokens (Schulman et al., 2016, eq. 16).

    Args:
        rewards_BT: [B, T] float32; positions outside the mask are ignored.
        values_BT: [B, T] float32, the value of the state before each token.
        mask_BT: [B, T] bool; holes (tool output) are bridged: the token before a hole looks at the one after it.
        gamma: discount, in [0, 1].
        lam: GAE lambda, in [0, 1].

    Returns:
        (advantages, returns), each [B, T] float32, zero outside the mask; advantages are not whitened.

    Raises:
        ValueError: shapes differ, or a factor lies outside [0, 1].
    """
    _check(rewards_BT, mask_BT, gamma, lam)
    if values_BT.shape != mask_BT.shape:
        raise ValueError(f"values must have the shape of the rewards, {mask_BT.shape}, got {values_BT.shape}")
    num_rows, num_tokens = mask_BT.shape
    advantages_BT = np.zeros((num_rows, num_tokens))
    advantage_B, next_value_B = np.zeros(num_rows), np.zeros(num_rows)
    for t in reversed(range(num_tokens)):
        mask_B, value_B = mask_BT[:, t], values_BT[:, t].astype(np.float64)
        delta_B = rewards_BT[:, t] + gamma * next_value_B - value_B
        advantage_B = np.where(mask_B, delta_B + gamma * lam * advantage_B, advantage_B)
        next_value_B = np.where(mask_B, value_B, next_value_B)
        advantages_BT[:, t] = advantage_B
    return _float32(advantages_BT, mask_BT), _float32(advantages_BT + values_BT, mask_BT)


def grpo(
    rewards_BT: Float32s,
    groups_B: NDArray[np.integer[Any]],
    mask_BT: Mask,
    *,
    norm_adv_by_std: bool,
    scored_BT: Mask | None = None,
) -> AdvantagesAndReturns:
    """Group-relative advantage (Shao et al., 2024): (s - mean) / (std + 1e-6) of the prompt's samples, on every token.

    Args:
        rewards_BT: [B, T] float32; s is a row's sum over `scored_BT`.
        groups_B: [B], equal for samples of one prompt. A group of one has mean 0 and standard deviation 1.
        mask_BT: [B, T] bool, tokens that get an advantage.
        norm_adv_by_std: off leaves out the division (Dr. GRPO; Liu et al., 2025).
        scored_BT: [B, T] bool, tokens whose rewards make up s; default: mask_BT. What is not learned from still
            belongs to the group that the others are compared with.

    Returns:
        (advantages, the same as returns).
    """
    scores_B, mean_B, count_B, group_B = _scores_and_group_means(rewards_BT, groups_B, mask_BT, scored_BT)
    centred_B = scores_B - mean_B
    variance_G = np.bincount(group_B, centred_B**2) / np.maximum(np.bincount(group_B) - 1, 1)
    std_B = np.where(count_B > 1, np.sqrt(variance_G[group_B]), 1.0)
    return _on_every_token(centred_B / (std_B + 1e-6) if norm_adv_by_std else centred_B, mask_BT)


def rloo(
    rewards_BT: Float32s, groups_B: NDArray[np.integer[Any]], mask_BT: Mask, *, scored_BT: Mask | None = None
) -> AdvantagesAndReturns:
    """Leave-one-out baseline (Ahmadian et al., 2024): s minus the mean of the prompt's other samples, on every token.

    A group of one has no others: its advantage is s. Arguments and result as in `grpo`.
    """
    scores_B, mean_B, count_B, _ = _scores_and_group_means(rewards_BT, groups_B, mask_BT, scored_BT)
    return _on_every_token((scores_B - mean_B) * count_B / np.maximum(count_B - 1, 1), mask_BT)


def reinforce_plus_plus(rewards_BT: Float32s, mask_BT: Mask, *, gamma: float) -> AdvantagesAndReturns:
    """REINFORCE++ (Hu, 2025): the discounted reward-to-go over the mask, holes bridged; not whitened.

    Returns:
        (advantages, the same as returns).
    """
    _check(rewards_BT, mask_BT, gamma)
    returns_BT, return_B = np.zeros(mask_BT.shape), np.zeros(len(mask_BT))
    for t in reversed(range(mask_BT.shape[1])):
        return_B = np.where(mask_BT[:, t], rewards_BT[:, t] + gamma * return_B, return_B)
        returns_BT[:, t] = return_B
    return _float32(returns_BT, mask_BT), _float32(returns_BT, mask_BT)


def reinforce_plus_plus_baseline(
    rewards_BT: Float32s, groups_B: NDArray[np.integer[Any]], mask_BT: Mask, *, scored_BT: Mask | None = None
) -> AdvantagesAndReturns:
    """REINFORCE++-baseline (Hu, 2025): s minus the mean of the prompt's samples, on every token; not whitened.

    Arguments and result as in `grpo`.
    """
    scores_B, mean_B, _, _ = _scores_and_group_means(rewards_BT, groups_B, mask_BT, scored_BT)
    return _on_every_token(scores_B - mean_B, mask_BT)


@dataclass(frozen=True)
class Estimator:
    """One way to estimate advantages.

    Attributes:
        function: takes rewards_BT, mask_BT and `inputs`, all by keyword.
        inputs: what else it reads, of compute_advantages' arguments.
        whiten: its advantages are whitened afterwards, over the whole batch.
    """

    function: Callable[..., AdvantagesAndReturns]
    inputs: tuple[str, ...]
    whiten: bool = False

    @property
    def needs_values(self) -> bool:
        """Whether a critic must run."""
        return "values_BT" in self.inputs


ESTIMATORS: Mapping[str, Estimator] = {
    "gae": Estimator(gae, ("values_BT", "gamma", "lam"), whiten=True),
    "grpo": Estimator(grpo, ("groups_B", "norm_adv_by_std", "scored_BT")),
    "rloo": Estimator(rloo, ("groups_B", "scored_BT")),
    "reinforce_plus_plus": Estimator(reinforce_plus_plus, ("gamma",), whiten=True),
    "reinforce_plus_plus_baseline": Estimator(reinforce_plus_plus_baseline, ("groups_B", "scored_BT"), whiten=True),
}


def check_estimator(name: str) -> Estimator:
    """The estimator of that name. ConfigError lists the known ones."""
    if name not in ESTIMATORS:
        raise ConfigError(f"key 'algorithm.adv_estimator': expected one of {', '.join(ESTIMATORS)}, got {name!r}")
    return ESTIMATORS[name]


def compute_advantages(
    name: str,
    rewards_BT: Float32s,
    mask_BT: Mask,
    *,
    groups_B: NDArray[np.integer[Any]],
    values_BT: Float32s | None = None,
    scored_BT: Mask | None = None,
    gamma: float = 1.0,
    lam: float = 1.0,
    norm_adv_by_std: bool = True,
) -> AdvantagesAndReturns:
    """Advantages, ready for the loss, and returns, by the estimator `name`.

    Args:
        name: a key of ESTIMATORS.
        rewards_BT: [B, T] float32, KL penalty included.
        mask_BT: [B, T] bool.
        groups_B: [B] integers, equal for samples of one prompt.
        values_BT: [B, T] float32, if the estimator needs values.
        scored_BT: [B, T] bool, tokens whose rewards make up a response's score; default: mask_BT. See `grpo`.
        gamma: discount, in [0, 1].
        lam: GAE lambda, in [0, 1].
        norm_adv_by_std: see `grpo`.

    Returns:
        (advantages, returns), each [B, T] float32, zero outside the mask.

    Raises:
        ValueError: the name is unknown, an argument does not fit, or fewer than two tokens are there to whiten.
    """
    chosen = check_estimator(name)
    given = {
        "groups_B": groups_B,
        "values_BT": values_BT,
        "scored_BT": scored_BT,
        "gamma": gamma,
        "lam": lam,
        "norm_adv_by_std": norm_adv_by_std,
    }
    if chosen.needs_values and values_BT is None:
        raise ValueError(f"estimator {name!r} needs values")
    advantages_BT, returns_BT = chosen.function(
        rewards_BT=rewards_BT, mask_BT=mask_BT, **{key: given[key] for key in chosen.inputs}
    )
    if chosen.whiten:
        advantages_BT = _float32(masked_whiten(advantages_BT, mask_BT), mask_BT)
    return advantages_BT, returns_BT


def _scores_and_group_means(
    rewards_BT: Float32s, groups_B: NDArray[np.integer[Any]], mask_BT: Mask, scored_BT: Mask | None
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.int64], NDArray[np.int64]]:
    """Per row: its score, its group's mean score (0 in a group of one), its group's size and index."""
    _check(rewards_BT, mask_BT)
    if groups_B.shape != mask_BT.shape[:1]:
        raise ValueError(f"groups must have shape {mask_BT.shape[:1]}, got {groups_B.shape}")
    scores_B = masked_sum(rewards_BT, mask_BT if scored_BT is None else scored_BT, axis=1)
    _, group_B, count_G = np.unique(groups_B, return_inverse=True, return_counts=True)
    mean_G = np.bincount(group_B, scores_B, minlength=len(count_G)) / count_G
    count_B = count_G[group_B]
    return scores_B, np.where(count_B > 1, mean_G[group_B], 0.0), count_B, group_B


def _on_every_token(advantage_B: NDArray[np.float64], mask_BT: Mask) -> AdvantagesAndReturns:
    advantages_BT = _float32(np.broadcast_to(advantage_B[:, None], mask_BT.shape), mask_BT)
    return advantages_BT, advantages_BT.copy()


def _float32(values_BT: NDArray[np.floating[Any]], mask_BT: Mask) -> Float32s:
    return np.where(mask_BT, values_BT, 0.0).astype(np.float32)


def _check(rewards_BT: Float32s, mask_BT: Mask, *factors: float) -> None:
    if mask_BT.dtype != np.bool_ or mask_BT.ndim != 2:
        raise ValueError(f"the mask must be [B, T] bool, got {mask_BT.dtype} with shape {mask_BT.shape}")
    if rewards_BT.shape != mask_BT.shape:
        raise ValueError(f"rewards must have the shape of the mask, {mask_BT.shape}, got {rewards_BT.shape}")
    if not all(0.0 <= factor <= 1.0 for factor in factors):
        raise ValueError(f"gamma and lam must lie in [0, 1], got {factors}")
