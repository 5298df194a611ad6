"""Hugging Face folders out: what users take away from a run."""

import os
import shutil
from collections.abc import Iterable
from pathlib import Path

import torch
import transformers
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoConfig, GenerationConfig
from transformers.utils import logging as hf_logging

# What makes a tokenizer, and how to generate; everything else in a model folder is config or weights.
TOKENIZER_FILES = (
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


def copy_files(source: Path, folder: Path, names: Iterable[str] = TOKENIZER_FILES) -> None:
    """Copies those files that the source folder has."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
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
