"""Finds an output layer of its own in a model folder whose config.json ties the output layer to the embedding.

Only bytes are compared: numpy has no bf16.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from controller.models.shape import EMBEDDINGS
from splitppo.config import ConfigError
from splitppo.weight_files import weight_files

_OUTPUT_LAYERS = ("lm_head.weight", "embed_out.weight")
_CHUNK = 64 << 20  # bytes that are compared at a time


@dataclass(frozen=True)
class _StoredBytes:
    """A tensor in a file: its name, its type in the words of safetensors, and its bytes, read when they are used."""

    name: str
    dtype: str
    content: NDArray[np.uint8]


def check_tied_weights(folder: Path, description: Mapping[str, Any], key: str) -> None:
    """Checks that an output layer which config.json (`description`) ties to the embedding has the embedding's values.

    Layers of different types are left to the workers, which compare values. `key` is the configuration key that has
    the folder, for errors.

    Raises:
        ConfigError: the two differ.
        ValueError: see `weight_files`.
    """
    if description.get("tie_word_embeddings") is not True:
        return
    files = weight_files(folder)
    output = _find(files, _OUTPUT_LAYERS)
    embedding = _find(files, EMBEDDINGS)
    if output is None or embedding is None:
        return
    if output.dtype == embedding.dtype and not _are_equal(output.content, embedding.content):
        raise ConfigError(
            f"{key}: config.json in {folder} ties {output.name} to {embedding.name}, but their values differ: to use"
            f" both, set tie_word_embeddings to false in it; else remove {output.name}"
        )


def _find(files: list[Path], ends: tuple[str, ...]) -> _StoredBytes | None:
    """Finds the tensor whose name has one of these ends; safetensors has a header in JSON, then the tensors."""
    for file in files:
        content = np.memmap(file, np.uint8, "r")
        first = 8 + int.from_bytes(content[:8].tobytes(), "little")
        header = json.loads(content[8:first].tobytes())
        for name in header:
            if name.endswith(ends):
                start, stop = header[name]["data_offsets"]
                return _StoredBytes(name, header[name]["dtype"], content[first + start : first + stop])
    return None


def _are_equal(one: NDArray[np.uint8], other: NDArray[np.uint8]) -> bool:
    starts = range(0, max(len(one), len(other)), _CHUNK)
    return all(np.array_equal(one[start : start + _CHUNK], other[start : start + _CHUNK]) for start in starts)
