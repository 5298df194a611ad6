"""Finds tokens that get no policy loss in an update, because the policy has moved too far since sampling.

Legend: N response tokens of all rows of a micro-batch, packed; every row is whole.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from services.actor.losses.policy_loss import PolicyTokens
from splitppo.config.subsections.rejection import Rejection


def rejected(tokens: PolicyTokens, rejections: Sequence[Rejection]) -> Tensor:
    """Marks tokens that fail any criterion lower <= statistic <= upper, [N] bool (verl: rollout_rs, bypass mode).

        d = old_log_prob - log_prob, within +-MAX_LOG_RATIO;   k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d

    The statistic is k of the token, or the sum, mean or maximum of k over the tokens of its row that count.
    """
    rejected_N = torch.zeros_like(tokens.mask)
    for rejection in rejections:
        statistic_N = _statistic(rejection, tokens)
        lower = -torch.inf if rejection.lower is None else rejection.lower
        rejected_N = rejected_N | (statistic_N > rejection.upper) | (statistic_N < lower)
    return rejected_N


def _statistic(rejection: Rejection, tokens: PolicyTokens) -> Tensor:
    """Computes for each token what is compared with the bounds of a rejection, [N]; all tokens of a row may share it.

    The number that is compared estimates the KL from the sampled policy by the ratio r = exp(log_ratio) (Schulman,
    2020): k1 = -log r, k2 = (log r)^2 / 2, k3 = r - 1 - log r. The number is the token's own, or one for the row.
    """
    d_N = -tokens.log_ratio.detach()
    match rejection.estimate:
        case "k1":
            estimate_N = d_N
        case "k2":
            estimate_N = 0.5 * d_N.square()
        case _:
            estimate_N = torch.exp(-d_N) - 1.0 + d_N
    if rejection.over == "token":
        return estimate_N
    over_row = {"seq_sum": tokens.row_sum, "seq_mean": tokens.row_mean, "seq_max": tokens.row_max}
    return over_row[rejection.over](estimate_N)
