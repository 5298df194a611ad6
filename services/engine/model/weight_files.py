"""The weights of a Hugging Face folder, read a few rows at a time: nobody ever holds more of them than it keeps."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from torch import Tensor

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
# Rows are read in pieces of about this size; what a file offers is mapped, not held.
PIECE_BYTES = 64 << 20


class WeightSource(Protocol):
    """Tensors by name."""

    def __contains__(self, name: object) -> bool: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def rows(self, name: str, start: int, stop: int) -> Iterator[tuple[int, Tensor]]:
        """(number of the first row, rows) of consecutive pieces of [start, stop); a scalar is its row 0."""
        ...


class WeightFiles:
    """The safetensors files of a folder.

    Raises:
        ValueError: the folder has none, or an index that names others.
        OSError, SafetensorError: a file cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        index = folder / INDEX_FILE
        if index.is_file():
            names: Mapping[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            if lacking := sorted({file for file in names.values() if not (folder / file).is_file()}):
                raise ValueError(f"{INDEX_FILE} names {lacking[0]}, which is not there")
            files = {file: _open(folder / file) for file in sorted(set(names.values()))}
        elif (folder / SINGLE_FILE).is_file():
            files = {SINGLE_FILE: _open(folder / SINGLE_FILE)}
        else:
            raise ValueError(f"expected its weights in {SINGLE_FILE} or {INDEX_FILE}, found neither")
        self._slices = {name: file.get_slice(name) for file in files.values() for name in file.keys()}  # noqa: SIM118

    def __contains__(self, name: object) -> bool:
        return name in self._slices

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slices[name].get_shape())

    def rows(self, name: str, start: int, stop: int) -> Iterator[tuple[int, Tensor]]:
        rows, shape = self._slices[name], self.shape(name)
        if not shape:
            yield 0, rows[...].reshape(1)
            return
        step = max(1, PIECE_BYTES // max(1, 4 * torch.Size(shape[1:]).numel()))
        for first in range(start, stop, step):
            yield first, rows[first : min(stop, first + step)]


class WholeWeights:
    """Tensors that are in memory already."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def rows(self, name: str, start: int, stop: int) -> Iterator[tuple[int, Tensor]]:
        tensor = self._tensors[name]
        yield (start, tensor[start:stop]) if tensor.ndim else (0, tensor.reshape(1))


def _open(file: Path) -> Any:
    return safe_open(file, framework="pt").__enter__()  # type: ignore[no-untyped-call] # mapped until it is collected
