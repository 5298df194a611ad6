"""Writes a trained model as a Hugging Face folder: tokenizer files and safetensors weights."""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoConfig, GenerationConfig
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils import logging as hf_logging

from splitppo.atomic_write import sync_folder
from splitppo.machine.memory_limits import MAX_FILE_BYTES

# The files of a tokenizer, and of generation; all other files of a model folder are config or weights.
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
    """Copies files by name from folder `source` to `folder` (by default tokenizer files); skips missing files."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)


def write_weights(
    folder: Path, num_bytes: Mapping[str, int], read: Callable[[Sequence[str]], dict[str, Tensor]]
) -> None:
    """Writes weights into a Hugging Face folder with a config, file by file: at most MAX_FILE_BYTES are in memory.

    `num_bytes` is the size of each weight in bytes, by name, and `read` returns the weights with the given names.

    Raises:
        ValueError: the folder has no config, or transformers lacks the architecture in the config.
        OSError: storage has failed.
    """
    model = model_without_weights(folder)
    files = [*_layers_by_file(num_bytes)]
    weight_map: dict[str, str] = {}
    for number, names in enumerate(files, 1):
        # In a new folder, because transformers removes the files of other weights from the folder that it saves to.
        with TemporaryDirectory(dir=folder) as part:
            with storage_errors_of(folder):
                model.save_pretrained(part, state_dict=read(names))
            weights = Path(part) / SAFE_WEIGHTS_NAME
            if len(files) > 1:
                weights = weights.rename(weights.with_name(f"model-{number:05d}-of-{len(files):05d}.safetensors"))
                with safe_open(weights, "pt") as stored:
                    weight_map |= dict.fromkeys(stored.keys(), weights.name)
            for file in Path(part).iterdir():
                file.replace(folder / file.name)
    if weight_map:
        write_index(folder, weight_map, sum(num_bytes.values()))
    _make_durable(folder)


@contextmanager
def storage_errors_of(folder: Path) -> Iterator[None]:
    """Turns an error of safetensors, which the `with` block raises while it writes to `folder`, into an OSError."""
    try:
        yield
    except SafetensorError as error:
        raise OSError(f"{folder}: {error}") from error


def write_index(folder: Path, weight_map: Mapping[str, str], num_bytes: int) -> None:
    """Writes the index of a folder's weights: the name of the file of each weight, and the size of all in bytes."""
    index = {"metadata": {"total_size": num_bytes}, "weight_map": weight_map}
    (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


@contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """Gives the `with` block a new folder, which then replaces `folder`, if the block has raised nothing.

    A reader never sees a part of the new folder, also after a crash. What a crash has left beside it is removed.
    """
    partial, earlier = (folder.with_name(f"{folder.name}.{state}") for state in ("partial", "earlier"))
    for left_over in (*folder.parent.glob("*.partial"), *folder.parent.glob("*.earlier")):
        shutil.rmtree(left_over)
    partial.mkdir(parents=True)
    try:
        yield partial
        _make_durable(partial)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    if folder.exists():
        folder.rename(earlier)
    partial.rename(folder)
    sync_folder(folder.parent)
    shutil.rmtree(earlier, ignore_errors=True)


def _make_durable(folder: Path) -> None:
    for file in folder.iterdir():
        with file.open("rb") as stream:
            os.fsync(stream.fileno())
    sync_folder(folder)


def model_without_weights(folder: Path) -> Any:
    """Builds the model of a Hugging Face folder's config on the meta device, without weights.

    Raises:
        ValueError: see `write_weights`.
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
    return model


def _layers_by_file(num_bytes: Mapping[str, int]) -> Iterator[list[str]]:
    """Yields the weight names of each file; a layer's weights share a file: transformers may merge them."""
    layers: dict[str, list[str]] = {}
    for name in num_bytes:
        in_layer = re.match(r".*?\.\d+(?=\.)", name)
        layers.setdefault(in_layer.group() if in_layer else name, []).append(name)
    names: list[str] = []
    for layer in layers.values():
        if names and sum(num_bytes[name] for name in names + layer) > MAX_FILE_BYTES:
            yield names
            names = []
        names = names + layer
    yield names
