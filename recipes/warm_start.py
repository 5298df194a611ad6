"""Makes the small models that the recipes for a CPU begin with, and trains them by supervised steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import TypeVar

import torch
from tokenizers import Tokenizer
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedConfig, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM
from transformers.utils import logging as transformers_logging

IGNORED = -100
BATCH_SIZE = 32
LR = 2e-3
GRAD_CLIP = 1.0
# The token ids of a row, and its labels: the same ids where the model learns, IGNORED elsewhere.
Example = tuple[Sequence[int], Sequence[int]]
Model = TypeVar("Model", bound=PreTrainedModel)


def train(config: Qwen2Config, examples: Iterator[Example], num_steps: int, *, seed: int) -> Qwen2ForCausalLM:
    """Trains a random Qwen2 by supervised steps; equal arguments give an equal model on a machine.

    Args:
        config: the shape of the model, with its padding token.
        examples: without end; each step takes BATCH_SIZE of them.
        num_steps: the number of optimizer steps.
        seed: of the random weights.
    """
    model = random_model(Qwen2ForCausalLM, config, seed=seed)
    return fit(model, _batches(examples, config.pad_token_id), num_steps)


def random_model(model_class: type[Model], config: PreTrainedConfig, *, seed: int) -> Model:
    """Returns a model of this shape with random weights, and sets torch to one thread.

    A model of this size trains no faster with two threads, which wait for each other on a busy machine.
    """
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    return model_class(config)


def fit(model: Model, batches: Iterator[Mapping[str, torch.Tensor]], num_steps: int) -> Model:
    """Trains a model by supervised steps, and returns it.

    Args:
        model: any that returns a loss.
        batches: without end, one for each step: the arguments of the model, with labels.
        num_steps: the number of optimizer steps.
    """
    transformers_logging.disable_progress_bar()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.99), weight_decay=0.01, fused=True)
    model.train()
    for batch in islice(batches, num_steps):
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), GRAD_CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return model.eval()


def small_qwen2(
    tokenizer: Tokenizer, *, eos: str, pad: str, max_position_embeddings: int, hidden_size: int = 128
) -> Qwen2Config:
    """Returns the configuration of a Qwen2 of two layers; `eos` and `pad` are tokens of the tokenizer."""
    vocabulary = tokenizer.get_vocab()
    return Qwen2Config(
        vocab_size=len(vocabulary),
        hidden_size=hidden_size,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        intermediate_size=2 * hidden_size,
        initializer_range=0.08,
        max_position_embeddings=max_position_embeddings,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=vocabulary[eos],
        pad_token_id=vocabulary[pad],
    )


def _batches(examples: Iterator[Example], pad_token_id: int) -> Iterator[dict[str, torch.Tensor]]:
    while True:
        ids, labels = zip(*islice(examples, BATCH_SIZE), strict=True)
        yield {"input_ids": _padded(ids, pad_token_id), "labels": _padded(labels, IGNORED)}


def _padded(rows: Sequence[Sequence[int]], value: int) -> torch.Tensor:
    """Returns the rows as one tensor [B, S] int64, right-padded."""
    return pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=value)
