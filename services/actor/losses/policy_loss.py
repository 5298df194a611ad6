"""What a policy loss is: a function of the response tokens of a micro-batch, one value per token.

Legend: N response tokens of all rows of a micro-batch, packed; R rows, each whole, of which there are at most N.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from splitppo.config import ActorConfig

# Nats; log-ratios are clamped to it before they are exponentiated.
MAX_LOG_RATIO = 20.0


@dataclass(frozen=True, eq=False)
class PolicyTokens:
    """What a policy loss sees, [N] each. A token that does not count has a loss like the others; nobody reads it.

    Attributes:
        log_probs: float32, under the policy in training; they alone have a gradient.
        old_log_probs: float32, under the policy that the experience was collected with.
        advantages: float32.
        mask: bool, tokens that count.
        row_index: int64, the row of each token inside the micro-batch.
    """

    log_probs: Tensor
    old_log_probs: Tensor
    advantages: Tensor
    mask: Tensor
    row_index: Tensor

    @cached_property
    def log_ratio(self) -> Tensor:
        """log_probs - old_log_probs, within +-MAX_LOG_RATIO."""
        return (self.log_probs - self.old_log_probs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)

    def row_mean(self, values_N: Tensor) -> Tensor:
        """[N], for each token the mean of `values_N` over the tokens of its row that count; 0 where none does."""
        counts_N = self.mask.to(values_N.dtype)
        zeros_R = torch.zeros_like(values_N)
        sum_R = zeros_R.index_add(0, self.row_index, torch.where(self.mask, values_N, 0.0))
        num_R = zeros_R.index_add(0, self.row_index, counts_N)
        return (sum_R / num_R.clamp(min=1.0))[self.row_index]


# Returns (loss [N], metrics [N] each, reported as means over the tokens that count). What the losses of all tokens add
# up with are weights that were made from the whole mini-batch: a loss sees neither them nor other rows, and waits for
# nothing on the device (no .item()).
PolicyLoss = Callable[[PolicyTokens, ActorConfig], tuple[Tensor, Mapping[str, Tensor]]]
