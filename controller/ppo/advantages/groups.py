"""Advantage estimators that compare the samples of a prompt: one advantage per response, the same on all its tokens.

The arguments of all estimators:

    rewards_BT: token rewards; s, the score of a response, is their sum over `scored_BT`.
    groups_B: a number that is equal for the samples of one prompt. A group of one has mean 0 and standard deviation 1.
    mask_BT: the tokens that get an advantage.
    scored_BT: the tokens whose rewards count, by default mask_BT. They count in the group also if nothing is learned
        from them.

Returns are the advantages.
"""

import numpy as np

from controller.ppo.advantages.arrays import AdvantagesAndReturns, Integers, on_every_token, scores_of
from controller.ppo.masked_stats import Float32s, Float64s, Mask

_EPSILON = 1e-6


def grpo(
    rewards_BT: Float32s, groups_B: Integers, mask_BT: Mask, *, norm_adv_by_std: bool, scored_BT: Mask | None = None
) -> AdvantagesAndReturns:
    """Group-relative advantages (GRPO; Shao et al., 2024).

        A = (s - mean(s of the prompt's samples)) / (std(s of the prompt's samples) + 1e-6)

    std is unbiased; `norm_adv_by_std` off leaves out the division (Dr. GRPO; Liu et al., 2025).
    """
    scores_B = scores_of(rewards_BT, mask_BT, scored_BT)
    return on_every_token(_relative(scores_B, _Groups(groups_B, mask_BT), norm_adv_by_std), mask_BT)


def grpo_passk(
    rewards_BT: Float32s, groups_B: Integers, mask_BT: Mask, *, norm_adv_by_std: bool, scored_BT: Mask | None = None
) -> AdvantagesAndReturns:
    """Advantages of GRPO for pass@k: only the best sample of a group learns.

        A = (s - second best s of the prompt's samples) / (std(s of the prompt's samples) + 1e-6)

    for the best sample, 0 for the others (Tang et al., 2025, leave-one-out of the maximum). If two samples are best,
    and in a group of one, all get 0. `norm_adv_by_std` off leaves out the division.
    """
    scores_B = scores_of(rewards_BT, mask_BT, scored_BT)
    groups = _Groups(groups_B, mask_BT)
    # By group, then from the best to the worst: the best of a group comes first, the second best after it.
    order_B = np.lexsort((-scores_B, groups.index_B))
    first_G = np.cumsum(groups.count_G) - groups.count_G
    first_of_several = first_G[groups.count_G > 1]
    best = order_B[first_of_several]
    second_best = order_B[first_of_several + 1]
    advantage_B = np.zeros(len(scores_B))
    advantage_B[best] = scores_B[best] - scores_B[second_best]
    if norm_adv_by_std:
        advantage_B /= groups.std(scores_B) + _EPSILON
    return on_every_token(advantage_B, mask_BT)


def gdpo(
    groups_B: Integers,
    mask_BT: Mask,
    *,
    components_KB: Float32s,
    component_weights_K: Float64s,
    norm_adv_by_std: bool,
) -> AdvantagesAndReturns:
    """Advantages of GDPO (Liu et al., 2026): group advantages of each component of a score, added up, not normalised.

        A = sum over k of weight_k * (c_k - mean(c_k of the group)) / (std(c_k of the group) + 1e-6)

    c_k is component k of a response's score; token rewards are not used. Division by std as in `grpo`. The batch step
    (registry.py) normalises over responses, as the paper does.
    """
    groups = _Groups(groups_B, mask_BT)
    if components_KB.shape != (len(component_weights_K), len(mask_BT)):
        expected = (len(component_weights_K), len(mask_BT))
        raise ValueError(f"components must have shape {expected}, got {components_KB.shape}")
    relative_KB = [_relative(part_B, groups, norm_adv_by_std) for part_B in components_KB.astype(np.float64)]
    return on_every_token(np.asarray(component_weights_K @ np.stack(relative_KB)), mask_BT)


def rloo(
    rewards_BT: Float32s, groups_B: Integers, mask_BT: Mask, *, scored_BT: Mask | None = None
) -> AdvantagesAndReturns:
    """Advantages with a leave-one-out baseline (RLOO; Ahmadian et al., 2024).

        A = s - mean(s of the prompt's other samples) = (s - mean(s of all n)) * n / (n - 1)

    A group of one has no others: its advantage is s.
    """
    scores_B = scores_of(rewards_BT, mask_BT, scored_BT)
    groups = _Groups(groups_B, mask_BT)
    count_B = groups.count_G[groups.index_B]
    return on_every_token(groups.centred(scores_B) * count_B / np.maximum(count_B - 1, 1), mask_BT)


def opo(
    rewards_BT: Float32s, groups_B: Integers, mask_BT: Mask, *, scored_BT: Mask | None = None
) -> AdvantagesAndReturns:
    """Advantages with a length-weighted mean score of the group as baseline (OPO; Hao et al., 2025).

        A = s - sum(l * s of the prompt's samples) / sum(l of the prompt's samples)

    with l the number of a response's tokens in `scored_BT`. A group of one has no baseline: its advantage is s.
    """
    scores_B = scores_of(rewards_BT, mask_BT, scored_BT)
    groups = _Groups(groups_B, mask_BT)
    lengths_B = (mask_BT if scored_BT is None else scored_BT).sum(axis=1)
    totals_G = groups.sums(lengths_B)
    baseline_G = groups.sums(lengths_B * scores_B) / np.maximum(totals_G, 1.0)
    return on_every_token(scores_B - np.where(groups.count_G > 1, baseline_G, 0.0)[groups.index_B], mask_BT)


def less_group_mean(
    rewards_BT: Float32s, groups_B: Integers, mask_BT: Mask, *, scored_BT: Mask | None = None
) -> AdvantagesAndReturns:
    """Advantages of REINFORCE++-baseline (Hu, 2025) and GPG (Chu et al., 2025), before their batch steps (registry.py).

        A = s - mean(s of the prompt's samples)

    REINFORCE++-baseline whitens A over the tokens of the batch. GPG multiplies it by alpha = B / max(1, number of s
    that are not 0).
    """
    return grpo(rewards_BT, groups_B, mask_BT, norm_adv_by_std=False, scored_BT=scored_BT)


class _Groups:
    """Responses grouped by prompt: the group of each response, counted from 0, and the size of each group."""

    def __init__(self, groups_B: Integers, mask_BT: Mask) -> None:
        if groups_B.shape != mask_BT.shape[:1]:
            raise ValueError(f"groups must have shape {mask_BT.shape[:1]}, got {groups_B.shape}")
        _, self.index_B, self.count_G = np.unique(groups_B, return_inverse=True, return_counts=True)

    def sums(self, values_B: Float64s | Integers) -> Float64s:
        """Sums a number per response, [B], over the responses of each group: [G]."""
        return np.bincount(self.index_B, values_B, minlength=len(self.count_G)).astype(np.float64)

    def centred(self, values_B: Float64s) -> Float64s:
        """Subtracts from each response's value the mean of its group: [B]; in a group of one, the value stays."""
        mean_G = np.where(self.count_G > 1, self.sums(values_B) / self.count_G, 0.0)
        return np.asarray(values_B - mean_G[self.index_B])

    def std(self, values_B: Float64s) -> Float64s:
        """Returns the unbiased standard deviation of each response's group, [B]; 1 in a group of one."""
        variance_G = self.sums(self.centred(values_B) ** 2) / np.maximum(self.count_G - 1, 1)
        return np.where(self.count_G > 1, np.sqrt(variance_G), 1.0)[self.index_B]


def _relative(values_B: Float64s, groups: _Groups, norm_by_std: bool) -> Float64s:
    """Returns values less the means of their groups, [B]; `norm_by_std` divides by (standard deviation + 1e-6)."""
    centred_B = groups.centred(values_B)
    return centred_B / (groups.std(values_B) + _EPSILON) if norm_by_std else centred_B
