"""Computes the attention of models in training: causal over right-padded rows, or over packed rows.

The attention is registered with transformers under the name ATTENTION. No mask is ever built: right padding comes
after every real token, so causality alone hides the padding, and `cu_seq_lens_q` separates packed rows.
"""

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional
from torch.nn.attention.varlen import varlen_attn
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from transformers import AttentionInterface

from services.engine.batching.padded_rows import PaddedRows
from services.engine.model.sequence_parallel import to_heads, to_positions

ATTENTION = "splitppo_causal"

# Options that change a score or a weight and are not implemented here.
_UNSUPPORTED = ("s_aux", "softcap", "position_bias")
_KERNELS = ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu")
_HALF = (torch.bfloat16, torch.float16)
_MOST_GROUPED = 256  # the widest head of which torch's fast kernels take groups
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


@torch.compiler.disable  # type: ignore[no-untyped-call,untyped-decorator]
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
    sequence_group: ProcessGroup | None = None,
    padded_rows: PaddedRows | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Computes causal attention as a function for transformers; returns (output [B, S, heads, head_dim], None).

    Query, key and value are [B, heads, S, head_dim]. Key and value may have fewer heads than the query (grouped-query
    attention). A token sees `sliding_window` positions, itself included (None: all before it). `cu_seq_lens_q`
    [num_rows + 1] int32 is where each packed row starts; the longest row has `max_length_q` tokens. Without
    `cu_seq_lens_q` each batch element is one right-padded row. In a `sequence_group` S are this rank's positions, and
    `cu_seq_lens_q` is of all positions. With `padded_rows` packed rows are computed in these groups, and nothing is
    read from the device. This function is never compiled: its kernels are made already, lengths may be read from the
    device, and ranks may communicate.

    Raises:
        NotImplementedError: the model needs attention sinks, soft-capped scores or a position bias.
    """
    if unsupported := [name for name in _UNSUPPORTED if others.get(name) is not None]:
        raise NotImplementedError(f"{type(module).__name__} needs {unsupported[0]}, which training cannot do")
    if cu_seq_lens_q is None:
        return _causal(query, key, value, scaling=scaling, sliding_window=sliding_window), None
    PackedCalls.count += 1
    if sequence_group is not None:
        query, key, value = (to_heads(states, sequence_group) for states in (query, key, value))
    if padded_rows is not None:
        output = _in_groups(query, key, value, padded_rows, scaling, sliding_window)
    else:
        output = _packed(query, key, value, cu_seq_lens_q, max_length_q or 0, scaling, sliding_window)
    return output if sequence_group is None else to_positions(output, sequence_group), None


def _packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_lens: Tensor,
    max_length: int,
    scaling: float | None,
    sliding_window: int | None,
) -> Tensor:
    """Computes causal attention inside each packed row, [1, S, heads, head_dim]."""
    if query.is_cuda and query.dtype in _HALF:
        output: Any = varlen_attn(
            query[0].transpose(0, 1),
            key[0].transpose(0, 1),
            value[0].transpose(0, 1),
            cu_seq_lens,
            cu_seq_lens,
            max_length,
            max_length,
            scale=scaling,
            window_size=(-1 if sliding_window is None else sliding_window - 1, 0),
            **_GROUPED_HEADS,
        )
        whole: Tensor = output.unsqueeze(0)
        return whole
    lengths = cu_seq_lens.diff().tolist()
    rows = zip(*(torch.split(tensor, lengths, dim=2) for tensor in (query, key, value)), strict=True)
    return torch.cat([_causal(*qkv, scaling=scaling, sliding_window=sliding_window) for qkv in rows], dim=1)


def _in_groups(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    padded_rows: PaddedRows,
    scaling: float | None,
    sliding_window: int | None,
) -> Tensor:
    """Computes causal attention inside each packed row as in right-padded batches, [1, S, heads, head_dim].

    A batch is a group of rows: `positions` [rows, length] say which packed token stands where in it. `places` [S] say
    where each packed token is among the outputs of all groups, one behind the other.
    """
    tokens = [states[0].transpose(0, 1) for states in (query, key, value)]  # [S, heads, head_dim]
    outputs = []
    for positions in padded_rows.positions:
        rows = [states.index_select(0, positions.flatten()) for states in tokens]
        padded = [states.view(*positions.shape, *states.shape[1:]).transpose(1, 2) for states in rows]
        outputs.append(_causal(*padded, scaling=scaling, sliding_window=sliding_window).flatten(0, 1))
    return torch.cat(outputs).index_select(0, padded_rows.places).unsqueeze(0)


def takes_grouped_heads(query: Tensor) -> bool:
    """Returns False if torch has no fast kernel that takes fewer key-value heads than query heads: fp32 on a GPU.

    Its other kernel has all scores in memory.
    """
    return not query.is_cuda or query.dtype in _HALF


def _causal(query: Tensor, key: Tensor, value: Tensor, *, scaling: float | None, sliding_window: int | None) -> Tensor:
    """Computes causal attention of a right-padded batch with torch's sdpa, [B, S, heads, head_dim].

    Key and value may have fewer heads than the query, each for a group of query heads. Where torch's fast kernels take
    no groups, the heads of key and value are repeated.
    Without a sliding window, or in rows that fit into it, no mask is made.
    """
    mask = None
    length = query.shape[2]
    if sliding_window is not None and length > sliding_window:
        distance = torch.arange(length, device=query.device)
        distance = distance[:, None] - distance
        mask = ((distance >= 0) & (distance < sliding_window))[None, None]
    heads_per_group = query.shape[1] // key.shape[1]
    has_kernel = takes_grouped_heads(query) and key.shape[-1] == value.shape[-1] <= _MOST_GROUPED
    takes_groups = mask is None and has_kernel  # else torch's slow kernel
    if heads_per_group > 1 and not takes_groups:
        key = key.repeat_interleave(heads_per_group, dim=1)
        value = value.repeat_interleave(heads_per_group, dim=1)
    output = functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        scale=scaling,
        is_causal=mask is None and length > 1,
        enable_gqa=heads_per_group > 1 and takes_groups,
    )
    return output.transpose(1, 2).contiguous()


AttentionInterface.register(ATTENTION, causal_attention)
