"""Kernels that only CUDA has, by their definitions: attention of packed rows, and products with another dtype.

Legend: N tokens of all rows, H heads, D their width; rows lie back to back.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

_LIBRARIES: list[torch.library.Library] = []
as_cpu = torch.ops.rehearsal.as_cpu


def install() -> None:
    """Registers the kernels."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", attention, "CUDA")
    library.impl("_flash_attention_backward", attention_backward, "CUDA")
    library.impl("mm.dtype", product, "CUDA")
    library.impl("addmm.dtype", sum_with_product, "CUDA")
    library.impl("addmm.dtype_out", sum_with_product_out, "CUDA")
    _LIBRARIES.append(library)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts_q: Tensor,
    starts_k: Tensor,
    max_q: int,
    max_k: int,
    dropout: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    **others: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Computes softmax(scale * Q K^T) V of every row; [N, H, D] each.

    Returns:
        what FlashAttention does: the output, the logarithm of each softmax's divisor [H, N], and three empty tensors.
    """
    _check(query, key, value, starts_q, starts_k, max_q)
    rows = _Rows(query, key, value, starts_q, scale, is_causal, window_size_left, window_size_right)
    outputs, divisors = [], []
    for _, _, _, v, scores in rows:
        outputs.append((scores.softmax(-1) @ v).transpose(0, 1))
        divisors.append(scores.logsumexp(-1))
    output = torch.cat(outputs).to(query.dtype).to(query.device)
    nothing = torch.zeros(2, dtype=torch.int64, device=query.device)
    return output, torch.cat(divisors, 1).to(query.device), nothing, nothing.clone(), nothing.clone()


def attention_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    divisors: Tensor,
    starts_q: Tensor,
    starts_k: Tensor,
    max_q: int,
    max_k: int,
    dropout: float,
    is_causal: bool,
    rng_state: Tensor,
    unused: Tensor,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes the gradients of query, key and value from that of the output.

    With P the softmax: dV = P^T dO; dS = P * (dO V^T - rowsum(dO V^T * P)) * scale; dQ = dS K; dK = dS^T Q.
    """
    _check(query, key, value, starts_q, starts_k, max_q)
    gradient = as_cpu(gradient).float()
    found = [torch.zeros(tensor.shape) for tensor in (query, key, value)]
    rows = _Rows(query, key, value, starts_q, scale, is_causal, window_size_left, window_size_right)
    for row, q, k, v, scores in rows:
        of_output = gradient[row].transpose(0, 1)
        probabilities = scores.softmax(-1)
        of_probabilities = of_output @ v.transpose(1, 2)
        of_scores = of_probabilities - (of_probabilities * probabilities).sum(-1, keepdim=True)
        of_scores = of_scores * probabilities * rows.scale
        found[0][row] = (of_scores @ k).transpose(0, 1)
        found[1][row] = rows.of_groups(of_scores.transpose(1, 2) @ q)
        found[2][row] = rows.of_groups(probabilities.transpose(1, 2) @ of_output)
    query_gradient, key_gradient, value_gradient = (tensor.to(query.dtype).to(query.device) for tensor in found)
    return query_gradient, key_gradient, value_gradient


class _Rows:
    """The rows of a call: (slice of tokens, Q, K, V, scaled and masked scores), [H, tokens, D] in fp32, on the CPU."""

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        starts: Tensor,
        scale: float | None,
        is_causal: bool,
        left: int | None,
        right: int | None,
    ) -> None:
        self._tensors = [as_cpu(tensor).float() for tensor in (query, key, value)]
        self._starts = as_cpu(starts).tolist()
        self._num_groups = query.shape[1] // key.shape[1]
        self.scale = query.shape[-1] ** -0.5 if scale is None else scale
        self._sees_future = not (is_causal or right == 0)
        self._left = left if left is not None and left >= 0 else None

    def __iter__(self) -> Iterator[tuple[slice, Tensor, Tensor, Tensor, Tensor]]:
        for begin, end in zip(self._starts[:-1], self._starts[1:], strict=True):
            row = slice(begin, end)
            q, k, v = (tensor[row].transpose(0, 1) for tensor in self._tensors)
            k, v = (tensor.repeat_interleave(self._num_groups, 0) for tensor in (k, v))
            scores = (q @ k.transpose(1, 2) * self.scale).masked_fill(self._hidden(end - begin), -torch.inf)
            yield row, q, k, v, scores

    def of_groups(self, gradient: Tensor) -> Tensor:
        """Adds up what the heads of a group give their common key or value; [tokens, heads of keys, D]."""
        return gradient.unflatten(0, (-1, self._num_groups)).sum(1).transpose(0, 1)

    def _hidden(self, num_tokens: int) -> Tensor:
        distance = torch.arange(num_tokens)[:, None] - torch.arange(num_tokens)
        hidden = torch.zeros_like(distance, dtype=torch.bool)
        if not self._sees_future:
            hidden |= distance < 0
        if self._left is not None:
            hidden |= distance > self._left
        return hidden


def _check(query: Tensor, key: Tensor, value: Tensor, starts_q: Tensor, starts_k: Tensor, max_q: int) -> None:
    """Refuses what the kernel refuses, or would read beside."""
    if query.dtype not in (torch.bfloat16, torch.float16):
        raise RuntimeError(f"FlashAttention only supports fp16 and bf16 data types, got {query.dtype}")
    if any(tensor.device != query.device for tensor in (key, value, starts_q, starts_k)):
        raise RuntimeError("FlashAttention: query, key, value and cu_seqlens must be on the same device")
    if any(starts.dtype != torch.int32 or not starts.is_contiguous() for starts in (starts_q, starts_k)):
        raise RuntimeError("FlashAttention: cu_seqlens must be contiguous int32")
    if any(tensor.stride(-1) != 1 for tensor in (query, key, value)):
        raise RuntimeError("FlashAttention: the last dimension must be contiguous")
    if query.shape[-1] > 256 or query.shape[1] % key.shape[1]:
        raise RuntimeError("FlashAttention: at most 256 per head, and key heads that divide the query heads")
    starts = as_cpu(starts_q)
    lengths = starts.diff()
    if starts[0] != 0 or starts[-1] != len(query) or (len(lengths) and int(lengths.max()) > max_q):
        raise RuntimeError(f"FlashAttention: rows {starts.tolist()}, longest {max_q}, of {len(query)} tokens")


def product(left: Tensor, right: Tensor, out_dtype: torch.dtype) -> Tensor:
    """Computes a matrix product of bf16 or fp16 tensors whose sums stay in fp32."""
    if left.dtype != right.dtype or left.dtype not in (torch.bfloat16, torch.float16) or out_dtype != torch.float32:
        raise RuntimeError(
            f"out_dtype: expected fp32 from two of fp16 or bf16: {left.dtype}, {right.dtype}, {out_dtype}"
        )
    if left.device != right.device:
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found {left.device}, {right.device} (mm)"
        )
    return (as_cpu(left).float() @ as_cpu(right).float()).to(left.device)


def sum_with_product(
    summand: Tensor, left: Tensor, right: Tensor, out_dtype: torch.dtype, *, beta: float = 1, alpha: float = 1
) -> Tensor:
    """Computes beta * summand + alpha * left @ right, whose sums stay in fp32."""
    if summand.dtype not in (out_dtype, left.dtype):
        raise RuntimeError(f"out_dtype: the summand is {summand.dtype}, expected {out_dtype} or {left.dtype}")
    return beta * summand + alpha * product(left, right, out_dtype)


def sum_with_product_out(
    summand: Tensor,
    left: Tensor,
    right: Tensor,
    out_dtype: torch.dtype,
    *,
    beta: float = 1,
    alpha: float = 1,
    out: Tensor,
) -> Tensor:
    """Computes `sum_with_product` into a tensor."""
    if out.dtype != out_dtype:
        raise RuntimeError(f"out_dtype: out is {out.dtype}, expected {out_dtype}")
    return out.copy_(sum_with_product(summand, left, right, out_dtype, beta=beta, alpha=alpha))
