"""Decoding with several query heads per key-value head, against sdpa of Hugging Face."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from services.rollout.hf_backend.grouped_attention import grouped_attention
from tests.support.seeds import shifted


def build(num_key_value_heads: int = 2, attention: str = "sdpa") -> Any:
    torch.manual_seed(shifted(0))
    config = LlamaConfig(
        vocab_size=23,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=num_key_value_heads,
        initializer_range=0.3,
        attn_implementation=attention,
    )
    return LlamaForCausalLM(config).eval()


@torch.no_grad()
def next_logits(model: Any, mask: torch.Tensor | None) -> torch.Tensor:
    """Returns the logits of one new token per row, after seven tokens."""
    ids, cache = torch.randint(0, 23, (3, 8), generator=torch.Generator().manual_seed(shifted(1))), DynamicCache()
    model(input_ids=ids[:, :7], attention_mask=None if mask is None else mask[:, :7], past_key_values=cache)
    logits: torch.Tensor = model(input_ids=ids[:, 7:], attention_mask=mask, past_key_values=cache).logits
    return logits


@pytest.mark.parametrize("num_key_value_heads", [1, 2, 6])
@pytest.mark.parametrize("is_padded", [False, True])
def test_logits_equal_those_of_sdpa(num_key_value_heads: int, is_padded: bool) -> None:
    model = build(num_key_value_heads)
    mask = torch.arange(8) >= torch.tensor([[0], [3], [5]]) if is_padded else None

    expected = next_logits(model, mask)
    with grouped_attention(model):
        computed = next_logits(model, mask)

    torch.testing.assert_close(computed, expected, atol=1e-5, rtol=1e-5)


def test_the_model_has_its_own_attention_again_afterwards_also_after_an_error() -> None:
    model = build()

    with contextlib.suppress(KeyError), grouped_attention(model):
        inside = model.config._attn_implementation
        raise KeyError

    assert inside != "sdpa"
    assert model.config._attn_implementation == "sdpa"


def test_a_model_with_another_attention_keeps_it() -> None:
    model = build(attention="eager")

    with grouped_attention(model):
        assert model.config._attn_implementation == "eager"
