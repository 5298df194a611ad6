"""Which tokens end a response."""

from __future__ import annotations

import logging
from typing import Any

from torch import nn
from transformers import AutoTokenizer

log = logging.getLogger(__name__)


def stop_token_ids(model: nn.Module, tokenizer: str) -> list[int]:
    """All end-of-sequence ids that the model's generation config, its config and the tokenizer name, ascending.

    Chat models name several: the end of the turn in one place, the end of the text in another. A missing tokenizer or
    a model without any such id is no error; responses then end at their maximal length.

    Args:
        model: a Hugging Face model.
        tokenizer: local folder or hub name.
    """
    found: set[int] = set()
    for config in (getattr(model, "generation_config", None), model.config):
        found |= _as_ids(getattr(config, "eos_token_id", None))
    try:
        found |= _as_ids(load_tokenizer(tokenizer).eos_token_id)
    except ValueError as error:
        log.warning("nobody to ask for the tokenizer's end-of-sequence id: %s", error)
    if not found:
        log.warning("neither the model nor its tokenizer names an end-of-sequence id: no response ends early")
    return sorted(found)


def load_tokenizer(name: str) -> Any:
    """The Hugging Face tokenizer of a local folder or hub name.

    Raises:
        ValueError: there is none.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ValueError(f"{name} has no usable tokenizer: {error}") from error
    # Where a folder holds a model alone, Hugging Face makes up a tokenizer of special tokens with ids of its own.
    if len(tokenizer) <= len(set(tokenizer.all_special_ids)):
        raise ValueError(f"{name} has no tokenizer")
    return tokenizer


def _as_ids(value: Any) -> set[int]:
    if value is None:
        return set()
    return {int(token) for token in value} if isinstance(value, list | tuple) else {int(value)}
