"""SplitPPO's causal attention against that of transformers, padded and packed."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from services.engine.batching.padded_rows import PaddedRows
from services.engine.model.attention import causal_attention
from services.rollout.hf_backend import grouped_attention
from tests.support.engines import CPU
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


@pytest.mark.parametrize("window", [None, 3])
def test_rows_in_padded_groups_have_the_outputs_and_gradients_of_packed_rows(window) -> None:
    lengths = np.array([5, 1, 6, 2, 0, 4])
    starts = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)])).int()
    weights = torch.linspace(-1.0, 1.0, 18 * 4 * 8).view(1, 18, 4, 8)
    results = []
    for padded_rows in (None, PaddedRows.of(lengths, CPU)):
        states = [tensor.requires_grad_() for tensor in qkv(1, 18)]
        output, _ = causal_attention(
            Layer(),
            *states,
            None,
            scaling=0.3,
            sliding_window=window,
            cu_seq_lens_q=starts,
            max_length_q=6,
            padded_rows=padded_rows,
        )
        (output * weights).sum().backward()
        results.append([output.detach(), *(tensor.grad for tensor in states)])
    for padded, packed in zip(*results, strict=True):
        torch.testing.assert_close(padded, packed, rtol=1e-5, atol=1e-5)


class Calls(TorchFunctionMode):
    """Records (heads of the query, of the key, whether groups are taken) of each call of sdpa, and computes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[int, int, bool]] = []

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        options = options or {}
        if function is not nn.functional.scaled_dot_product_attention:
            return function(*arguments, **options)
        query, key, _ = (*arguments, *(options[name] for name in ("query", "key", "value") if name in options))[:3]
        grouped = bool(options.get("enable_gqa")) and query.shape[1] > key.shape[1]
        self.calls.append((query.shape[1], key.shape[1], grouped))
        return torch.empty_like(query)


class OnGpu(Tensor):
    """A tensor that says it is on a GPU; it has no values, so it cannot be read."""

    is_cuda = True


def on_gpu(dtype: torch.dtype, *shape: int) -> Any:
    return torch.empty(*shape, dtype=dtype, device="meta").as_subclass(OnGpu)


def qkv_on_gpu(dtype: torch.dtype, batch: int, length: int) -> list[Tensor]:
    return [on_gpu(dtype, batch, heads, length, 8) for heads in (4, 2, 2)]


def test_packed_fp32_rows_on_a_gpu_make_no_call_for_each_row_and_read_nothing_from_it() -> None:
    rows = PaddedRows.of(np.array([5, 6, 4, 3, 5, 6]), torch.device("meta"))
    packed = {"cu_seq_lens_q": on_gpu(torch.int32, 7), "max_length_q": 6, "padded_rows": rows}
    with Calls() as seen:
        output, _ = causal_attention(Layer(), *qkv_on_gpu(torch.float32, 1, 29), None, **packed)
    assert seen.calls == [(4, 4, False)]
    assert output.shape == (1, 29, 4, 8)


@pytest.mark.parametrize(("dtype", "call"), [(torch.float32, (4, 4, False)), (torch.bfloat16, (4, 2, True))])
def test_on_a_gpu_key_value_heads_are_repeated_where_the_kernel_for_groups_has_all_scores_in_memory(
    dtype: torch.dtype, call: tuple[int, int, bool]
) -> None:
    with Calls() as seen:
        causal_attention(Layer(), *qkv_on_gpu(dtype, 3, 9), None)
        grouped_attention._attention(Layer(), *qkv_on_gpu(dtype, 3, 9), None)
    assert seen.calls == [call, call]
