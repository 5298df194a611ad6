"""The form of a policy loss: a function of the response tokens of a micro-batch, one value per token.

Legend: N response tokens of all rows of a micro-batch, packed; every row is whole.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from splitppo.batch import Batch, Column
from splitppo.config import ActorConfig

# Nats; log-ratios are clamped to it before they are exponentiated.
MAX_LOG_RATIO = 20.0


@dataclass(frozen=True, eq=False)
class PolicyTokens:
    """The tokens that a policy loss sees, [N] each. One that does not count has a loss like the others, never read.

    Attributes:
        log_probs: float32, under the policy in training; they alone have a gradient.
        old_log_probs: float32, under the policy that the experience was collected with.
        advantages: float32.
        mask: bool, tokens that count.
        row_index: int64, the row of each token, of those in the micro-batch that have one.
        selected: bool, tokens that `PolicyLoss.prepare` has selected of the whole mini-batch; none without it.
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

    def row_max(self, values_N: Tensor) -> Tensor:
        """[N], likewise their maximum, of values of at least 0; 0 where no token of the row counts."""
        counted_N = torch.where(self.mask, values_N, 0.0)
        return torch.zeros_like(counted_N).scatter_reduce(0, self.row_index, counted_N, "amax")[self.row_index]


# Returns (loss [N], metrics [N] each, reported as means over the tokens that count). The losses of all tokens add up
# with weights that were made from the whole mini-batch: a loss sees neither them nor other rows, and waits for nothing
# on the device (no .item()).
LossOfTokens = Callable[[PolicyTokens, ActorConfig], tuple[Tensor, Mapping[str, Tensor]]]


@dataclass(frozen=True)
class PolicyLoss:
    """A policy loss, and the decisions of some that need the whole mini-batch.

    Attributes:
        prepare: makes the column `selected_tokens`, on rank 0, from all rows of an update with `mini_batches`, before
            they go to ranks; it comes back as `PolicyTokens.selected`. ValueError for rows that it cannot take.
        prepared_from: columns that `prepare` reads beside those of every update.
    """

    of_tokens: LossOfTokens
    prepare: Callable[[ActorConfig, Batch], Column] | None = None
    prepared_from: Sequence[str] = ()

    def __call__(self, tokens: PolicyTokens, config: ActorConfig) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Returns the loss of each token, and metrics; see `LossOfTokens`."""
        return self.of_tokens(tokens, config)
