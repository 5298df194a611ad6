"""Hugging Face folders out: what users take away from a run."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoConfig, GenerationConfig
from transformers.utils import logging as hf_logging

# What makes a tokenizer, and how to generate; everything else in a model folder is config or weights.
COPIED_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)


def write_description(model: Any, source: Path, folder: Path) -> None:
    """Writes the config of a model, and the tokenizer files of the folder it came from."""
    folder.mkdir(parents=True, exist_ok=True)
    model.config.save_pretrained(folder)
    for name in COPIED_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)


def write_weights(folder: Path, weights: dict[str, Tensor]) -> None:
    """Adds weights to a folder that has a config.

    Raises:
        ValueError: no config, or of an architecture that transformers does not have.
        OSError: storage has failed.
    """
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} has no config.json")
    config = AutoConfig.from_pretrained(folder)
    architecture = (config.architectures or ["none"])[0]
    model_class = getattr(transformers, architecture, None)
    if model_class is None:
        raise ValueError(f"{folder / 'config.json'}: transformers has no architecture {architecture!r}")
    with torch.device("meta"):
        model = model_class(config)
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    hf_logging.disable_progress_bar()
    try:
        model.save_pretrained(folder, state_dict=weights)
    except SafetensorError as error:
        raise OSError(f"{folder}: {error}") from error
    for file in folder.iterdir():
        with file.open("rb") as stream:
            os.fsync(stream.fileno())
