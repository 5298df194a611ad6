"""The contract of a strategy, by which the ranks of a group hold models."""

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Protocol

from torch import nn


class Strategy(Protocol):
    """The way in which the ranks of a group hold models, for all models of the group; all ranks call each method.

    The names and whole shapes of parameters do not change. Each parameter is a plain tensor, which is whole and equal
    on every rank, or a DTensor that is whole or divided in its first dimension (Shard(0)).
    Loading, checkpoints, digests, weight sync and export need to know no more, so checkpoints move between strategies.
    A gradient is placed like its parameter.
    """

    def shard(self, model: nn.Module, *, bf16: bool, forward_method: str) -> None:
        """Places a model whose weights are on the meta device: each rank gets memory for its part, without values.

        With `bf16` forward and backward passes compute in bfloat16; trained weights and their gradients stay float32.
        The model is called by `forward` and by its method `forward_method`.
        """

    def sync_gradients(self, model: nn.Module, *, last: bool) -> AbstractContextManager[None]:
        """Gives a `with` block in which one forward and backward pass of a mini-batch runs.

        After the `last` pass of a mini-batch the gradients are the sums (not the means) over its passes and all ranks.
        """

    def gather(self, model: nn.Module) -> None:
        """Gathers all weights of a model on every rank until `release`, so that forward passes communicate nothing."""

    def release(self, model: nn.Module) -> None:
        """Frees a model's gathered weights; called after forward passes without backward, too."""

    def clip_gradients(self, parameters: Iterable[nn.Parameter], max_norm: float) -> float:
        """Scales gradients to a global norm of at most max_norm, if it is finite; returns the norm before scaling."""
