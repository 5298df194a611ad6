"""Defines what a policy loss is: a function of a micro-batch's response tokens that returns one value per token.

Legend: N response tokens of all rows of a micro-batch, packed; every row is whole if the loss `looks_at_rows`
(splitppo/config/subsections/policy_loss.py).
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
    """The response tokens that a policy loss gets, [N] each; the losses of tokens that do not count are not read.

    Attributes:
        log_probs: float32, under the policy in training; only these have a gradient.
        old_log_probs: float32, under the policy that the experience was collected with.
        advantages: float32.
        mask: bool, tokens that count.
        row_index: int64, the row of each token, counted over the rows of the micro-batch that have response tokens.
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
        """The log of the probability ratio, log_probs - old_log_probs, clamped to +-MAX_LOG_RATIO, [N]."""
        return (self.log_probs - self.old_log_probs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)

    def row_sum(self, values_N: Tensor) -> Tensor:
        """Sums `values_N` over the counting tokens of each row; every token gets the sum of its row, [N]."""
        counted_N = torch.where(self.mask, values_N, 0.0)
        return torch.zeros_like(counted_N).index_add(0, self.row_index, counted_N)[self.row_index]

    def row_mean(self, values_N: Tensor) -> Tensor:
        """Averages `values_N` over the counting tokens of each row (none: 0); every token gets its row's mean, [N]."""
        return self.row_sum(values_N) / self.row_sum(torch.ones_like(values_N)).clamp(min=1.0)

    def row_max(self, values_N: Tensor) -> Tensor:
        """Takes the maximum of 0 and `values_N` over each row's counting tokens; every token gets its row's, [N]."""
        counted_N = torch.where(self.mask, values_N, 0.0)
        return torch.zeros_like(counted_N).scatter_reduce(0, self.row_index, counted_N, "amax")[self.row_index]


# Returns (loss [N], metrics [N] each, reported as means over the tokens that count). The token losses are summed with
# weights made from the whole mini-batch. A loss sees neither these weights nor other rows, and never waits for the
# device (no .item()).
LossOfTokens = Callable[[PolicyTokens, ActorConfig], tuple[Tensor, Mapping[str, Tensor]]]


@dataclass(frozen=True)
class PolicyLoss:
    """A policy loss, and for some losses a function that first selects tokens from the whole mini-batch.

    Attributes:
        of_tokens: computes the loss of each token, and metrics.
        prepare: makes the column `selected_tokens`, on rank 0, from all rows of an update with `mini_batches`, before
            they go to ranks; the loss gets it as `PolicyTokens.selected`. Raises ValueError for rows it cannot use.
        prepared_from: columns that `prepare` reads in addition to those of every update.
    """

    of_tokens: LossOfTokens
    prepare: Callable[[ActorConfig, Batch], Column] | None = None
    prepared_from: Sequence[str] = ()

    def __call__(self, tokens: PolicyTokens, config: ActorConfig) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Computes the loss of each token [N] and metrics [N]; see `LossOfTokens`."""
        return self.of_tokens(tokens, config)
