"""Reads the weights of a Hugging Face folder in pieces, so that a rank needs little more memory than its shard."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from splitppo.weight_files import EXPECTED, weight_files

# Rows are read in pieces of about this size; the files are mapped, not read into memory.
PIECE_BYTES = 64 << 20

# A tensor in memory, or a tensor of a file in the form of safetensors: it has `get_shape()` and is read by slices.
StoredTensor = Any


def open_weights(folder: Path) -> dict[str, StoredTensor]:
    """Opens the safetensors files of a folder; returns their tensors by name, none of them read yet.

    Raises:
        ValueError: the folder has no weight files, or an index that cannot be used.
        OSError, SafetensorError: a file cannot be read.
    """
    files: list[Any] = [safe_open(file, framework="pt") for file in weight_files(folder)]  # mapped until collected
    if not files:
        raise ValueError(f"expected its weights in {EXPECTED}, found neither")
    return {name: file.get_slice(name) for file in files for name in file.keys()}  # noqa: SIM118


def shape_of(stored: StoredTensor) -> tuple[int, ...]:
    """Returns the shape of a whole stored tensor without reading its values."""
    return tuple(stored.shape if isinstance(stored, Tensor) else stored.get_shape())


def read_rows(stored: StoredTensor, start: int, stop: int) -> Iterator[tuple[int, Tensor]]:
    """Reads rows [start, stop) of a stored tensor in pieces; yields (first row, rows); a scalar counts as one row."""
    shape = shape_of(stored)
    if not shape:
        yield 0, stored[...].reshape(1)
        return
    step = max(1, PIECE_BYTES // max(1, 4 * torch.Size(shape[1:]).numel()))
    for first in range(start, stop, step):
        yield first, stored[first : min(stop, first + step)]
