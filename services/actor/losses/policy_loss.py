"""The form of a policy loss: a function of the response tokens of a micro-batch that returns one value per token.

Legend: N response tokens of all rows of a micro-batch, packed; every row is whole.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from splitppo.batch import Batch, Column
from splitppo.config import ActorConfig

# Nats; log-ratios are clamped to this range before they are exponentiated.
MAX_LOG_RATIO = 20.0


@dataclass(frozen=True, eq=False)
class PolicyTokens:
    """The tokens that a policy loss sees, [N] each. A token that does not count has a loss, too, but nothing reads it.

    Attributes:
        log_probs: float32, under the policy in training; only these have a gradient.
        old_log_probs: float32, under the policy that the experience was collected with.
        advantages: float32.
        mask: bool, tokens that count.
        row_index: int64, the row of each token, of those in the micro-batch that have one.
        selected: bool, the tokens that `PolicyLoss.prepare` has selected; all False without `prepare`.
    """

    log_probs: Tensor
    old_log_probs: Tensor
    advantages: Tensor
    mask: Tensor
    row_index: Tensor
    selected: Tensor | None = None

    @cached_property
    def log_ratio(self) -> Tensor:
        """The difference log_probs - old_log_probs, within +-MAX_LOG_RATIO."""
        return (self.log_probs - self.old_log_probs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)

    def row_sum(self, values_N: Tensor) -> Tensor:
        """Returns for each token the sum of `values_N` over the tokens of its row that count, [N]."""
        counted_N = torch.where(self.mask, values_N, 0.0)
        return torch.zeros_like(counted_N).index_add(0, self.row_index, counted_N)[self.row_index]

    def row_mean(self, values_N: Tensor) -> Tensor:
        """Returns for each token the mean of `values_N` over the tokens of its row that count, [N]; 0 without any."""
        return self.row_sum(values_N) / self.row_sum(torch.ones_like(values_N)).clamp(min=1.0)

    def row_max(self, values_N: Tensor) -> Tensor:
        """Returns for each token the maximum of `values_N` (>= 0) over the tokens of its row that count, [N], or 0."""
        counted_N = torch.where(self.mask, values_N, 0.0)
        return torch.zeros_like(counted_N).scatter_reduce(0, self.row_index, counted_N, "amax")[self.row_index]


# Returns (loss [N], metrics [N] each, reported as means over the tokens that count). The token losses are summed with
# weights made from the whole mini-batch. A loss sees neither these weights nor other rows, and never waits for the
# device (no .item()).
LossOfTokens = Callable[[PolicyTokens, ActorConfig], tuple[Tensor, Mapping[str, Tensor]]]


@dataclass(frozen=True)
class PolicyLoss:
    """A policy loss, and for some losses a selection of tokens that needs the whole mini-batch.

    Attributes:
        of_tokens: computes the loss.
        prepare: makes the column `selected_tokens`, on rank 0, from all rows of an update with `mini_batches`, before
            they go to ranks; the loss gets it as `PolicyTokens.selected`. Raises ValueError for rows it cannot use.
        prepared_from: columns that `prepare` reads in addition to those of every update.
    """

    of_tokens: LossOfTokens
    prepare: Callable[[ActorConfig, Batch], Column] | None = None
    prepared_from: Sequence[str] = ()

    def __call__(self, tokens: PolicyTokens, config: ActorConfig) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Returns the loss of each token, and metrics; see `LossOfTokens`."""
        return self.of_tokens(tokens, config)
