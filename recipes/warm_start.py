"""Makes the small Qwen2 models that the recipes for a CPU begin with, and trains them by supervised steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

import torch
from tokenizers import Tokenizer
from torch.nn.utils.rnn import pad_sequence
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.utils import logging as transformers_logging

IGNORED = -100
BATCH_SIZE = 32
LR = 2e-3
GRAD_CLIP = 1.0
# The token ids of a row, and its labels: the same ids where the model learns, IGNORED elsewhere.
Example = tuple[Sequence[int], Sequence[int]]


def train(config: Qwen2Config, examples: Iterator[Example], num_steps: int, *, seed: int) -> Qwen2ForCausalLM:
    """Trains a random Qwen2 by supervised steps, in one thread; equal arguments give an equal model on a machine.

    A model of this size trains no faster with two threads, which wait for each other on a busy machine.

    Args:
        config: the shape of the model, with its padding token.
        examples: without end; each step takes BATCH_SIZE of them.
        num_steps: the number of optimizer steps.
        seed: of the random weights.
    """
    transformers_logging.disable_progress_bar()
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    model = Qwen2ForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.99), weight_decay=0.01, fused=True)
    model.train()
    for _ in range(num_steps):
        ids, labels = zip(*islice(examples, BATCH_SIZE), strict=True)
        input_ids_BS = _padded(ids, config.pad_token_id)
        labels_BS = _padded(labels, IGNORED)
        loss = model(input_ids=input_ids_BS, labels=labels_BS, use_cache=False).loss
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


def _padded(rows: Sequence[Sequence[int]], value: int) -> torch.Tensor:
    """Returns the rows as one tensor [B, S] int64, right-padded."""
    return pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=value)
