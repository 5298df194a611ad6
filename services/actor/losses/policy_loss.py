"""What a policy loss is: a function of the response tokens of a micro-batch, one value per token.

Legend: N response tokens of all rows of a micro-batch, packed; every row is whole.
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
        selected: bool, tokens that were selected of the whole mini-batch; None but for losses that select some.
    """

    log_probs: Tensor
    old_log_probs: Tensor
    advantages: Tensor
    mask: Tensor
    row_index: Tensor
    selected: Tensor | None = None

    @cached_property
    def log_ratio(self) -> Tensor:
        """log_probs - old_log_probs, within +-MAX_LOG_RATIO."""
        return (self.log_probs - self.old_log_probs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)

    def row_sum(self, values_N: Tensor) -> Tensor:
        """[N], for each token the sum of `values_N` over the tokens of its row that count."""
        counted_N = torch.where(self.mask, values_N, 0.0)
        return torch.zeros_like(counted_N).index_add(0, self.row_index, counted_N)[self.row_index]

    def row_mean(self, values_N: Tensor) -> Tensor:
        """[N], likewise their mean; 0 where no token of the row counts."""
        return self.row_sum(values_N) / self.row_sum(torch.ones_like(values_N)).clamp(min=1.0)


# Returns (loss [N], metrics [N] each, reported as means over the tokens that count). What the losses of all tokens add
# up with are weights that were made from the whole mini-batch: a loss sees neither them nor other rows, and waits for
# nothing on the device (no .item()).
PolicyLoss = Callable[[PolicyTokens, ActorConfig], tuple[Tensor, Mapping[str, Tensor]]]
