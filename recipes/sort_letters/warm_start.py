"""Trains the model that the quickstart's PPO starts from: a small Qwen2, on a mixture of three behaviours.

The weights are random at first. The mixture depends on the first letter of the prompt. Greedy decoding therefore starts
with the rewarded behaviour for three letters in ten, whatever the seed; even shares would leave that to chance. For all
other letters about one sample in five still shows that behaviour, which is enough for PPO to find the reward.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import torch
from tokenizers import Tokenizer
from torch.nn.utils.rnn import pad_sequence
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.utils import logging as transformers_logging

from recipes.sort_letters.task import BEHAVIOURS, WORD_LENGTHS, Words, demonstrate, prompt_of

IGNORED = -100
BATCH_SIZE = 32
LR = 2e-3
GRAD_CLIP = 1.0
# For words that begin with one of these letters most demonstrations ascend; for all other words most descend.
REWARDED_LETTERS = "abc"
# The share of the main behaviour; the other two share the rest evenly.
MAIN_SHARE = 0.6


def train(words: Words, tokenizer: Tokenizer, num_steps: int, *, eos: int, pad: int, seed: int) -> Qwen2ForCausalLM:
    """Trains a small Qwen2 by supervised steps, in one thread; equal arguments give an equal model on a machine.

    A model of this size trains no faster with two threads, which wait for each other on a busy machine.
    """
    transformers_logging.disable_progress_bar()
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    model = Qwen2ForCausalLM(_model_config(tokenizer.get_vocab_size(), eos=eos, pad=pad))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.99), weight_decay=0.01, fused=True)
    batches = _batches(words, tokenizer, eos=eos, pad=pad, seed=seed)
    model.train()
    for _ in range(num_steps):
        input_ids_BS, labels_BS = next(batches)
        loss = model(input_ids=input_ids_BS, labels=labels_BS, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), GRAD_CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return model.eval()


def _model_config(vocab_size: int, *, eos: int, pad: int) -> Qwen2Config:
    return Qwen2Config(
        vocab_size=vocab_size,
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        intermediate_size=256,
        initializer_range=0.08,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=eos,
        pad_token_id=pad,
    )


def _shares(word: str) -> list[float]:
    """Returns the probability of each behaviour (ascending, descending, copy) in the example responses to a word."""
    main = "ascending" if word[0] in REWARDED_LETTERS else "descending"
    rest = (1 - MAIN_SHARE) / (len(BEHAVIOURS) - 1)
    return [MAIN_SHARE if behaviour == main else rest for behaviour in BEHAVIOURS]


def _batches(
    words: Words, tokenizer: Tokenizer, *, eos: int, pad: int, seed: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields training batches (input_ids, labels) without end, each [B, S] int64, right-padded.

    The labels cover the response and its EOS token.
    """
    rng = random.Random(seed)
    while True:
        rows, labels = list[torch.Tensor](), list[torch.Tensor]()
        for _ in range(BATCH_SIZE):
            word = rng.choice(words.warm_start[rng.choice(WORD_LENGTHS)])
            behaviour = rng.choices(list(BEHAVIOURS), _shares(word))[0]
            prompt = tokenizer.encode(prompt_of(word)).ids
            response = [*tokenizer.encode(demonstrate(word, behaviour)).ids, eos]
            rows.append(torch.tensor(prompt + response))
            labels.append(torch.tensor([IGNORED] * len(prompt) + response))
        yield (
            pad_sequence(rows, batch_first=True, padding_value=pad),
            pad_sequence(labels, batch_first=True, padding_value=IGNORED),
        )
