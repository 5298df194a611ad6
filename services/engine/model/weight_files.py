"""Reads weights from files in pieces, so that a rank needs little more memory than its shard."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from services.engine import parallel
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
    files = weight_files(folder)
    if not files:
        raise ValueError(f"expected its weights in {EXPECTED}, found neither")
    return {name: stored for file in files for name, stored in open_file(file).items()}


def open_file(file: Path) -> dict[str, StoredTensor]:
    """Opens one safetensors file; returns its tensors by name, none of them read yet; OSError, SafetensorError."""
    opened: Any = safe_open(file, framework="pt")  # mapped until collected
    return {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118


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


def have_equal_values(one: StoredTensor, other: StoredTensor, dtype: torch.dtype) -> bool:
    """Returns True if two stored tensors are the same in shape and, in a model of this dtype, in all values."""
    shape = shape_of(one)
    if shape != shape_of(other):
        return False
    num_rows = shape[0] if shape else 1
    pieces = zip(read_rows(one, 0, num_rows), read_rows(other, 0, num_rows), strict=True)
    return all(torch.equal(rows.to(dtype), of_other.to(dtype)) for (_, rows), (_, of_other) in pieces)


@torch.no_grad()
def fill(target: Tensor, name: str, stored: StoredTensor) -> None:
    """Copies this rank's rows of a stored tensor into `target`, sharded or not; ValueError if the shapes differ."""
    if (shape := shape_of(stored)) != tuple(target.shape):
        raise ValueError(f"{name} has shape {list(shape)}, expected {list(target.shape)}")
    start, stop = parallel.local_rows(target)
    shard = parallel.local(target)
    rows = shard if shard.ndim else shard.reshape(1)
    for first, piece in read_rows(stored, start, stop):
        rows[first - start : first - start + len(piece)].copy_(piece)
