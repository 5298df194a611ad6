"""Computes grouped-query attention of one new token per row faster than the sdpa of Hugging Face.

Each key-value head belongs to several query heads. The sdpa of Hugging Face repeats keys and values for every query
head, which for one query costs far more than the attention itself. Here the query heads of a key-value head are
computed as several queries.

Shapes: R rows, H query heads, K key-value heads, L positions, D head dimension.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward, use_gqa_in_sdpa
from transformers.masking_utils import sdpa_mask

from services.engine.model.attention import takes_grouped_heads
from services.engine.model.vision import use_attention

_GROUPED = "splitppo-grouped"


@contextmanager
def grouped_attention(model: Any) -> Iterator[None]:
    """Lets a Hugging Face model with sdpa use grouped attention in the `with` block; other models stay as they are."""
    if model.config._attn_implementation != "sdpa":  # noqa: SLF001 - there is no public name
        yield
        return
    use_attention(model, _GROUPED)
    try:
        yield
    finally:
        use_attention(model, "sdpa")


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Computes attention as `sdpa_attention_forward` does, faster for one query per row; ([R, queries, H, D], None).

    With one query per row there is nothing to mask causally, so the query heads that share a key head can stand as
    several queries of one head, and no key or value is repeated.
    """
    num_rows, num_heads, num_queries, head_dim = query.shape
    is_plain = options.get("position_bias") is None and (attention_mask is None or attention_mask.shape[1] == 1)
    if num_queries > 1 or key.shape[1] == num_heads or not is_plain:
        if use_gqa_in_sdpa(attention_mask, key, value) and not takes_grouped_heads(query):
            key, value = (states.repeat_interleave(num_heads // key.shape[1], dim=1) for states in (key, value))
        output: Tensor = sdpa_attention_forward(module, query, key, value, attention_mask, **options)[0]
        return output, None
    grouped = query.reshape(num_rows, key.shape[1], num_heads // key.shape[1], head_dim)
    scale = options.get("scaling")
    output = nn.functional.scaled_dot_product_attention(grouped, key, value, attn_mask=attention_mask, scale=scale)
    return output.reshape(num_rows, 1, num_heads, value.shape[3]), None


AttentionInterface.register(_GROUPED, _attention)
AttentionMaskInterface.register(_GROUPED, sdpa_mask)
