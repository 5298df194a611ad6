"""SplitPPO's causal attention against that of transformers, padded and packed."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import nn

from services.engine.model.attention import causal_attention
from tests.support.seeds import shifted


class Layer(nn.Module):
    """A layer with 4 heads over 2 key-value heads, as an attention function sees it."""

    num_key_value_groups = 2
    is_causal = True


def reference(query, key, value, scaling, window):
    """Attention by definition, in float64."""
    query, key, value = query.double(), key.double().repeat_interleave(2, 1), value.double().repeat_interleave(2, 1)
    length = query.shape[2]
    distance = torch.arange(length)[:, None] - torch.arange(length)
    visible = (distance >= 0) & (distance < (window or length))
    scores = (query @ key.transpose(-1, -2) * scaling).masked_fill(~visible, -torch.inf)
    return (scores.softmax(-1) @ value).transpose(1, 2)


def qkv(batch: int, length: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(shifted(length))
    return [torch.randn(batch, heads, length, 8, generator=generator) for heads in (4, 2, 2)]


@pytest.mark.parametrize("window", [None, 3, 100])
@pytest.mark.parametrize("length", [1, 9])
def test_padded_rows(window, length) -> None:
    query, key, value = qkv(3, length)
    output, _ = causal_attention(Layer(), query, key, value, None, scaling=0.3, sliding_window=window)
    torch.testing.assert_close(output.double(), reference(query, key, value, 0.3, window), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [None, 3])
def test_packed_rows_do_not_see_each_other(window) -> None:
    query, key, value = qkv(1, 12)
    bounds = [0, 5, 6, 12]
    output, _ = causal_attention(
        Layer(),
        query,
        key,
        value,
        None,
        scaling=0.3,
        sliding_window=window,
        cu_seq_lens_q=torch.tensor(bounds, dtype=torch.int32),
        max_length_q=6,
    )
    for start, end in pairwise(bounds):
        row = (tensor[:, :, start:end] for tensor in (query, key, value))
        expected = reference(*row, 0.3, window)
        torch.testing.assert_close(output[:, start:end].double(), expected, rtol=1e-5, atol=1e-5)
