"""A random Qwen2 of about a million parameters whose tokenizer knows GSM8K's words: small enough for a CPU.

It cannot reason, and PPO will not teach it to: it is there to take real rows through the whole pipeline.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM
from transformers.utils import logging as transformers_logging

from recipes.qwen2_tokenizer import save_tokenizer, train_tokenizer

PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
VOCAB_SIZE = 2048
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tiny_model(rows: Iterable[Mapping[str, Any]], folder: Path, *, seed: int = 0) -> int:
    """Writes model and tokenizer as a Hugging Face folder; returns the number of parameters.

    Args:
        rows: prepared rows; the tokenizer is trained on their prompts and worked answers.
        folder: made if it is missing.
        seed: of the weights.
    """
    tokenizer = train_tokenizer(_texts(rows), vocab_size=VOCAB_SIZE, special_tokens=[PAD, START, END])
    pad, _, end = (tokenizer.token_to_id(token) for token in (PAD, START, END))
    transformers_logging.disable_progress_bar()
    torch.manual_seed(seed)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=VOCAB_SIZE,
            hidden_size=128,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            intermediate_size=384,
            max_position_embeddings=1024,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=end,
            pad_token_id=pad,
        )
    )
    # As instruction-tuned Qwen2: a response ends with <|im_end|> or with <|endoftext|>.
    model.generation_config = GenerationConfig(eos_token_id=[end, pad], pad_token_id=pad)
    model.save_pretrained(folder)
    save_tokenizer(
        tokenizer,
        folder,
        named_tokens={"eos_token": END, "pad_token": PAD, "unk_token": PAD},
        chat_template=CHAT_TEMPLATE,
    )
    return sum(parameter.numel() for parameter in model.parameters())


def _texts(rows: Iterable[Mapping[str, Any]]) -> Iterable[str]:
    for row in rows:
        yield row["prompt"][0]["content"]
        yield row["extra_info"]["answer"]
