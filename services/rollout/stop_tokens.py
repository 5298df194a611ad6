"""Finds the token ids that end a response, and loads the tokenizer that names some of them."""

import logging
from typing import Any

from torch import nn
from transformers import AutoTokenizer

log = logging.getLogger(__name__)


def stop_token_ids(model: nn.Module, tokenizer: Any) -> list[int]:
    """Collects the end-of-sequence ids of a model's generation config, its config and its tokenizer, ascending.

    Chat models have several: the end of the turn in one place, the end of the text in another. Without any such
    id, responses end at their maximal length. `tokenizer` may be None.
    """
    stop_ids: set[int] = set()
    for source in (getattr(model, "generation_config", None), model.config, tokenizer):
        ids = getattr(source, "eos_token_id", None)
        stop_ids.update([] if ids is None else ids if isinstance(ids, list | tuple) else [ids])
    if not stop_ids:
        log.warning("neither the model nor its tokenizer names an end-of-sequence id: no response ends early")
    return sorted(map(int, stop_ids))


def load_tokenizer(name: str) -> Any:
    """Loads the Hugging Face tokenizer of a local folder or hub name; ValueError without a usable tokenizer."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ValueError(f"{name} has no usable tokenizer: {error}") from error
    # Where a folder holds a model alone, Hugging Face makes up a tokenizer of special tokens with ids of its own.
    if len(tokenizer) <= len(set(tokenizer.all_special_ids)):
        raise ValueError(f"{name} has no tokenizer")
    return tokenizer
