"""Computes the attention of models in training: causal over right-padded rows, or over packed rows.

The attention is registered with transformers under the name ATTENTION. No mask is ever built: right padding comes
after every real token, so causality alone hides the padding, and `cu_seq_lens_q` separates packed rows.
"""

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

ATTENTION = "splitppo_causal"

# Options that change a score or a weight and are not implemented here.
_UNSUPPORTED = ("s_aux", "softcap", "position_bias")
_KERNELS = ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu")
# A varlen_attn without this option takes grouped heads as they are.
_GROUPED_HEADS: Any = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


# What these compute is kept by `keep_attention`: attention on GPUs, packed and padded, and on CPUs.
_KEPT = [
    torch.ops.torch_attn._varlen_attn.default,  # noqa: SLF001
    *(getattr(torch.ops.aten, f"_scaled_dot_product_{kind}").default for kind in _KERNELS),
]


def keep_attention() -> Any:
    """Returns the contexts of a checkpointed layer that computes all again in its backward pass but attention."""
    return create_selective_checkpoint_contexts(_KEPT)  # type: ignore[no-untyped-call]


class PackedCalls:
    """Counts attention calls with packed rows, to find a model that does not pass `cu_seq_lens_q` on and mixes rows."""

    count = 0


def causal_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,  # noqa: ARG001 (transformers' signature; none is built for this attention)
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Computes causal attention as a function for transformers; returns (output [B, S, heads, head_dim], None).

    Query, key and value are [B, heads, S, head_dim]. Key and value may have fewer heads than the query (grouped-query
    attention). A token sees `sliding_window` positions, itself included (None: all before it). `cu_seq_lens_q`
    [num_rows + 1] int32 is where each packed row starts; the longest row has `max_length_q` tokens. Without
    `cu_seq_lens_q` each batch element is one right-padded row.

    Raises:
        NotImplementedError: the model needs attention sinks, soft-capped scores or a position bias.
    """
    if unsupported := [name for name in _UNSUPPORTED if others.get(name) is not None]:
        raise NotImplementedError(f"{type(module).__name__} needs {unsupported[0]}, which training cannot do")
    if cu_seq_lens_q is None:
        return _causal(module, query, key, value, scaling=scaling, sliding_window=sliding_window), None
    PackedCalls.count += 1
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):
        output: Any = varlen_attn(
            query[0].transpose(0, 1),
            key[0].transpose(0, 1),
            value[0].transpose(0, 1),
            cu_seq_lens_q,
            cu_seq_lens_q,
            max_length_q or 0,
            max_length_q or 0,
            scale=scaling,
            window_size=(-1 if sliding_window is None else sliding_window - 1, 0),
            **_GROUPED_HEADS,
        )
        return output.unsqueeze(0), None
    lengths = cu_seq_lens_q.diff().tolist()
    rows = zip(*(torch.split(tensor, lengths, dim=2) for tensor in (query, key, value)), strict=True)
    outputs = [_causal(module, *qkv, scaling=scaling, sliding_window=sliding_window) for qkv in rows]
    return torch.cat(outputs, dim=1), None


def _causal(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *, scaling: float | None, sliding_window: int | None
) -> Tensor:
    """Computes causal attention of a right-padded batch with torch's sdpa, [B, S, heads, head_dim]."""
    mask = None
    length = query.shape[2]
    if sliding_window is not None and length > sliding_window:
        distance = torch.arange(length, device=query.device)
        distance = distance[:, None] - distance
        mask = ((distance >= 0) & (distance < sliding_window))[None, None]
    output: Tensor = sdpa_attention_forward(
        module, query, key, value, mask, dropout=0.0, scaling=scaling, is_causal=True
    )[0]
    return output


AttentionInterface.register(ATTENTION, causal_attention)
