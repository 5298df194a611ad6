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
        found |= _as_ids(AutoTokenizer.from_pretrained(tokenizer).eos_token_id)
    except (OSError, ValueError) as error:
        log.warning("no tokenizer in %s to ask for its end-of-sequence id: %s", tokenizer, error)
    if not found:
        log.warning("neither the model nor its tokenizer names an end-of-sequence id: no response ends early")
    return sorted(found)


def _as_ids(value: Any) -> set[int]:
    if value is None:
        return set()
    return {int(token) for token in value} if isinstance(value, list | tuple) else {int(value)}
