"""Rows that are decoded together: prompts that are computed in parts give the rows that all at once give."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from services.rollout.hf_backend.decoding import DecodedRows
from splitppo.batch import Array
from tests.support.engines import CPU
from tests.support.seeds import shifted

LENGTHS = (3, 9, 9, 5, 2, 9, 7, 5)
SMALL: dict[str, Any] = {
    "vocab_size": 23,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
    "attn_implementation": "sdpa",
}


def build(family: str) -> Any:
    torch.manual_seed(shifted(0))
    if family == "llama":
        return LlamaForCausalLM(LlamaConfig(**SMALL)).eval()
    return MistralForCausalLM(MistralConfig(**SMALL, sliding_window=4)).eval()


def prompts_of(lengths: Sequence[int]) -> list[Array]:
    random = np.random.default_rng(shifted(1))
    return [random.integers(0, 23, length) for length in lengths]


class Masks:
    """Records rows and positions of each padded forward of a model: its mask has rows x positions^2 entries."""

    def __init__(self, model: Any) -> None:
        self.shapes: list[tuple[int, int]] = []
        self.num_forwards = 0
        model.register_forward_pre_hook(self._record, with_kwargs=True)

    def _record(self, _model: Any, _arguments: Any, options: dict[str, Any]) -> None:
        self.num_forwards += 1
        if options["attention_mask"] is not None:
            self.shapes.append(tuple(options["input_ids"].shape))


@torch.no_grad()
def own_logits(model: Any, prompt: Array, tokens: Sequence[int]) -> Tensor:
    """Returns the logits of the token after a prompt and some tokens, computed for this row alone."""
    ids = torch.from_numpy(np.concatenate([prompt, np.array(tokens, np.int64)]))
    logits: Tensor = model(input_ids=ids[None]).logits[0, -1]
    return logits


@torch.no_grad()
@pytest.mark.parametrize("max_mask", [1, 2 * 81, 4 * 81, 10_000])
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_rows_of_prompts_that_are_computed_in_parts_are_in_order_and_decode_as_alone(
    family: str, max_mask: int
) -> None:
    model = build(family)
    prompts = prompts_of(LENGTHS)
    prompts = [prompts[0], prompts[0], *prompts[1:], prompts[1]]  # several samples of a prompt
    decoded = DecodedRows(model, prompts, CPU, max_mask=max_mask)
    tokens: list[list[int]] = [[] for _ in prompts]
    for step in range(3):
        expected = torch.stack([own_logits(model, *row) for row in zip(prompts, tokens, strict=True)])
        torch.testing.assert_close(decoded.logits, expected, rtol=1e-4, atol=1e-4)
        sampled = [(7 * row + step) % 23 for row in range(len(prompts))]
        for row, token in enumerate(sampled):
            tokens[row].append(token)
        decoded.append(torch.tensor(sampled))


@torch.no_grad()
@pytest.mark.parametrize("max_mask", [1, 81, 2 * 81, 5 * 81])
def test_no_mask_is_larger_than_its_limit(max_mask: int) -> None:
    model = build("llama")
    masks = Masks(model)
    DecodedRows(model, prompts_of(LENGTHS), CPU, max_mask=max_mask)
    assert all(num_rows * length**2 <= max_mask for num_rows, length in masks.shapes)


@torch.no_grad()
def test_prompts_of_one_length_need_no_mask_and_are_one_part() -> None:
    model = build("llama")
    masks = Masks(model)
    DecodedRows(model, prompts_of([9] * 8), CPU, max_mask=1)
    assert (masks.shapes, masks.num_forwards) == ([], 1)
