"""Writes a trained model as a Hugging Face folder: files of tokenizer and images, config and safetensors weights.

The files of the folder that training began with are copied as they are. `save_pretrained` of transformers writes none
of this: it refuses values that do no harm, such as a temperature in generation_config.json without `do_sample`.
"""

import copy
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import safetensors.torch
import torch
import transformers
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from splitppo.atomic_write import sync_folder
from splitppo.config_error import sentence_of
from splitppo.machine.memory_limits import MAX_FILE_BYTES

# The files of a tokenizer, of generation, and of what makes images into pixels; all other files of a model folder are
# config or weights.
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
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)


def copy_files(source: Path, folder: Path, names: Iterable[str] = COPIED_FILES) -> None:
    """Copies files by name from folder `source` to `folder` (by default COPIED_FILES); skips missing files."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)


def write_weights(
    folder: Path, num_bytes: Mapping[str, int], read: Callable[[Sequence[str]], dict[str, Tensor]]
) -> None:
    """Writes fp32 weights into a Hugging Face folder with a config, file by file: at most MAX_FILE_BYTES are in memory.

    `num_bytes` is the size of each weight in bytes, by name, and `read` returns the weights with the given names. The
    config then says that the weights are fp32.

    Raises:
        ValueError: the folder has no config, or transformers lacks the architecture in the config.
        OSError: storage has failed.
    """
    model = model_without_weights(folder)
    not_saved = set(model._keys_to_ignore_on_save or ())  # noqa: SLF001 # transformers has no public name for it
    files = [*_layers_by_file(num_bytes)]
    weight_map: dict[str, str] = {}
    for number, names in enumerate(files, 1):
        file_name = SAFE_WEIGHTS_NAME
        if len(files) > 1:
            file_name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        weights = {name: weight for name, weight in read(names).items() if name not in not_saved}
        stored = {name: weight.contiguous() for name, weight in revert_weight_conversion(model, weights).items()}
        with storage_errors_of(folder):
            safetensors.torch.save_file(stored, folder / file_name, {"format": "pt"})
        weight_map |= dict.fromkeys(stored, file_name)
    write_config(model.config, torch.float32, folder)
    if len(files) > 1:
        write_index(folder, weight_map, sum(num_bytes.values()))
    _make_durable(folder)


def write_config(config: PreTrainedConfig, dtype: torch.dtype, folder: Path) -> None:
    """Writes config.json into a folder, with the dtype that the weights there have."""
    folder.mkdir(parents=True, exist_ok=True)
    described = copy.copy(config)
    described.dtype = dtype
    described.to_json_file(folder / "config.json")


def check_can_be_saved(config: PreTrainedConfig) -> None:
    """Checks that a folder with this config can get weights; ValueError if `write_weights` would fail for its sake."""
    with TemporaryDirectory() as folder:
        write_config(config, torch.float32, Path(folder))
        try:
            _build(Path(folder))
        except Exception as error:  # wrong sizes in a config may raise anything in transformers
            raise ValueError(f"a checkpoint of this model could not be exported: {sentence_of(error)}") from error


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
    partial = folder.with_name(f"{folder.name}.partial")
    earlier = folder.with_name(f"{folder.name}.earlier")
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
    """Returns when the files of a folder, and their names, are on the disk."""
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
    try:
        return _build(folder)
    except Exception as error:  # wrong sizes in a config may raise anything in transformers
        raise ValueError(f"{folder / 'config.json'}: {sentence_of(error)}") from error


def _build(folder: Path) -> Any:
    """Builds the model that a folder's config names, on the meta device; ValueError if transformers lacks it."""
    config = AutoConfig.from_pretrained(folder)
    architecture = (config.architectures or ["none"])[0]
    model_class = getattr(transformers, architecture, None)
    if model_class is None:
        raise ValueError(f"transformers has no architecture {architecture!r}")
    with torch.device("meta"):
        return model_class(config)


def _layers_by_file(num_bytes: Mapping[str, int]) -> Iterator[list[str]]:
    """Yields the weight names of each file; a layer's weights share a file: transformers may merge them."""
    layers: dict[str, list[str]] = {}
    for name in num_bytes:
        numbered_layer = re.match(r".*?\.\d+(?=\.)", name)  # e.g. model.layers.3
        layers.setdefault(numbered_layer.group() if numbered_layer else name, []).append(name)
    names: list[str] = []
    for layer in layers.values():
        if names and sum(num_bytes[name] for name in names + layer) > MAX_FILE_BYTES:
            yield names
            names = []
        names = names + layer
    yield names
