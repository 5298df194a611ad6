"""Divides the positions of packed rows among neighbouring ranks (Ulysses sequence parallelism).

    attention              all positions, own heads     query, key and value are traded before it, its output after it
    everything else        own positions, all heads     memory and work of 1 / S of the tokens, for S ranks

The ranks of a sequence group have the same rows. Attention alone sees more than one position, and it computes each head
by itself (Jacobs et al., 2023, DeepSpeed-Ulysses). Outputs of response tokens are computed where they lie, then
gathered, so that every rank sees whole rows in the loss; its backward pass goes through its own positions, and the
gradients of all ranks add up to that of the loss.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


def to_heads(states: Tensor, group: ProcessGroup) -> Tensor:
    """Trades own positions of all heads for all positions of own heads: [1, heads, own, D] to [1, heads / S, all, D].

    Fewer heads than ranks (grouped keys and values) are repeated.
    """
    if states.shape[1] % group.size():
        states = states.repeat_interleave(group.size() // states.shape[1], dim=1)
    return _trade(states, group)


def to_positions(states: Tensor, group: ProcessGroup) -> Tensor:
    """Trades all positions of own heads for own positions of all: [1, all, heads / S, D] to [1, own, heads, D]."""
    return _trade(states, group)


def gather(own: Tensor, tokens: slice, num_tokens: int, group: ProcessGroup) -> Tensor:
    """Joins the outputs of response tokens of all ranks, [num_tokens, ...]; `own` are those of this rank's `tokens`."""
    whole: Tensor = _Gather.apply(own, tokens, num_tokens, group)  # type: ignore[no-untyped-call]
    return whole


def _trade(states: Tensor, group: ProcessGroup) -> Tensor:
    """Divides dimension 1 of a tensor [1, n, m, D] among the ranks, and joins what they send along dimension 2."""
    parts: Tensor = states.unflatten(1, (group.size(), -1)).transpose(0, 1)  # type: ignore[no-untyped-call]
    received: Tensor = _AllToAll.apply(parts, group)  # type: ignore[no-untyped-call]
    return received.permute(1, 2, 0, 3, 4).flatten(2, 3)


def _exchange(parts: Tensor, group: ProcessGroup) -> Tensor:
    """Sends part r to rank r of the group; returns the parts that all ranks have sent to this one."""
    parts = parts.contiguous()  # empty_like keeps strides
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=group)
    return received


class _AllToAll(torch.autograd.Function):
    """Exchanges parts between ranks; in the backward pass gradients go back to where the parts came from."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return _exchange(parts, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _exchange(gradients[0], ctx.group), None


class _Gather(torch.autograd.Function):
    """Computes `gather`; every rank computes the same loss, so each takes its own part of the gradient."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, tokens: slice, num_tokens: int, group: ProcessGroup) -> Tensor:
        ctx.tokens = tokens
        ctx.set_materialize_grads(False)
        whole = own.new_zeros(num_tokens, *own.shape[1:])
        whole[tokens] = own
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, None, None, None]:
        return None if gradients[0] is None else gradients[0][ctx.tokens], None, None, None
