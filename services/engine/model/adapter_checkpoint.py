"""Writes and reads the files beside the shards of a checkpoint of adapters: their base, the adapter in peft's format.

The checkpoint has no weights of the base, but `base.json`, which names them by their sha256. The folder `adapter/` is
what peft and vLLM read. The adapter is not in `huggingface/`: there transformers would add it to weights that it is
merged into already.
"""

import functools
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any, Self

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from services.engine import hf_folder
from services.engine.model.adapters import describe_adapters, merge, peft_name, rank_of
from services.engine.model.loading import resolve_folder
from services.engine.model.weight_files import open_file, shape_of
from services.engine.model.weights import Kind, open_weights_of
from services.engine.shards import read_entries, read_weights, stored_weights
from splitppo.config import TrainedModelConfig
from splitppo.config.adapter_files import ADAPTER_WEIGHTS
from splitppo.manifest import DamagedCheckpoint, SealedFile, map_in_threads, measure
from splitppo.weight_files import weight_files

ADAPTER_FOLDER = "adapter"
_BASE_FILE = "base.json"

FileStates = tuple[tuple[str, int, int, int], ...]


@dataclass(frozen=True)
class AdapterBase(SealedFile):
    """The frozen model under the adapters of a checkpoint, and how they change it."""

    KIND = "description of a base model"
    model: str  # folder or name on the hub, as the configuration has it
    kind: Kind
    dtype: str  # in which it computes
    scaling: float  # lora_alpha / lora_rank
    weights: Mapping[str, str] = field(default_factory=dict)  # sha256 (hex) by the name of a file

    @classmethod
    def of(cls, model: Any, config: TrainedModelConfig, kind: Kind) -> Self | None:
        """Describes the base of a model, still without digests; None for a model without adapters."""
        if not config.lora_rank:
            return None
        return cls(config.model, kind, config.dtype, describe_adapters(model)[0])

    def with_digests(self, loaded: FileStates) -> Self:
        """Returns a copy with the sha256 of each weight file, whose states were `loaded` when the model was loaded.

        Raises:
            ValueError: a file has changed since then, so that nobody knows the base of the adapters any more.
        """
        if self.weights:
            return self
        folder = resolve_folder(self.model)
        if changed := set(file_states(folder)) ^ set(loaded):
            raise ValueError(
                f"{folder / min(changed)[0]} has changed since this run loaded it: checkpoints of adapters need the"
                " base that they were trained over"
            )
        return replace(self, weights=_digests(folder, loaded))


def file_states(folder: Path) -> FileStates:
    """Returns (name, size in bytes, time of the last change in ns, inode) of each weight file of a folder."""
    states = [(file.name, file.stat()) for file in weight_files(folder)]
    return tuple((name, state.st_size, state.st_mtime_ns, state.st_ino) for name, state in states)


@functools.cache
def _digests(folder: Path, _: FileStates) -> Mapping[str, str]:
    files = weight_files(folder)
    return {file.name: entry.sha256 for file, entry in zip(files, map_in_threads(measure, files), strict=True)}


def read_base(directory: Path) -> AdapterBase | None:
    """Reads the description of a checkpoint's base; None for a checkpoint of all weights.

    Raises:
        DamagedCheckpoint: the file is missing, or not as it was written; or the checkpoint is not complete.
    """
    if (directory / _BASE_FILE).is_file():
        return AdapterBase.read(directory / _BASE_FILE)
    if _rank_of(directory):
        raise DamagedCheckpoint(f"checkpoint {directory} is torn: {_BASE_FILE} is missing")
    return None


def _rank_of(directory: Path) -> int:
    """Returns the rank of the adapters in a checkpoint; 0 for a checkpoint of all weights."""
    entries = read_entries(directory).items()
    return next((entry.size[0] for name, entry in entries if name.endswith(".lora_A.weight")), 0)


def check_adapters(directory: Path, model: nn.Module, base: AdapterBase | None, loaded: FileStates) -> None:
    """Checks that a checkpoint has adapters of the same rank over the same base as a model, or neither has any.

    Raises:
        ValueError: it has not.
        DamagedCheckpoint: the checkpoint is not complete.
    """
    holds = _trained_weights(_rank_of(directory))
    trains = _trained_weights(rank_of(model))
    if holds != trains:
        raise ValueError(f"checkpoint {directory} holds {holds}, this run trains {trains}")
    found = read_base(directory)
    if base is not None and found is not None and found.weights != base.with_digests(loaded).weights:
        key = "actor" if base.kind == "policy" else "critic"
        raise ValueError(f"checkpoint {directory} was trained over another base than {key}.model holds")


def _trained_weights(lora_rank: int) -> str:
    """Names the weights that are trained with this rank of adapters, of which 0 means none, for an error."""
    return f"adapters of rank {lora_rank}" if lora_rank else "all weights"


def write_adapter(directory: Path, model: Any, base: AdapterBase) -> None:
    """Writes `base.json` and the folder `adapter/` into a checkpoint whose shards are there; for one rank alone."""
    (directory / _BASE_FILE).write_bytes(base.serialise())
    folder = directory / ADAPTER_FOLDER
    describe_adapters(model)[1].save_pretrained(folder)
    tensors = {peft_name(name): tensor for name, tensor in _read_trained(directory).items()}
    with hf_folder.storage_errors_of(folder):
        safetensors.torch.save_file(tensors, folder / ADAPTER_WEIGHTS, {"format": "pt"})


def copy_adapter(directory: Path, output: Path) -> None:
    """Copies the adapter of a checkpoint, in peft's format, to an empty folder.

    Raises:
        ValueError: the checkpoint has none, or it cannot be read.
    """
    if read_base(directory) is None:
        raise ValueError(f"{directory} holds all weights and no adapter: leave --adapter out")
    weights = directory / ADAPTER_FOLDER / ADAPTER_WEIGHTS
    try:
        names = open_file(weights).keys()
    except (OSError, SafetensorError) as error:
        raise DamagedCheckpoint(f"checkpoint {directory} is torn: {weights}: {error}") from error
    if not names:
        raise DamagedCheckpoint(f"checkpoint {directory} is torn: {weights} holds nothing")
    shutil.copytree(weights.parent, output, dirs_exist_ok=True)


def merged_weights(
    directory: Path, folder: Path, base: AdapterBase
) -> tuple[Mapping[str, int], Callable[[Sequence[str]], dict[str, Tensor]]]:
    """Returns the size in bytes of each whole weight of a checkpoint of adapters, and a function that reads some.

    The weights are fp32: the base as it computed, plus the adapters. `folder` has the config of the model.

    Raises:
        ValueError: the base is not there, or has other weights.
    """
    source = resolve_folder(base.model)
    if _digests(source, file_states(source)) != base.weights:
        raise ValueError(f"checkpoint {directory} was trained over another base than {source} holds")
    stored = open_weights_of(hf_folder.model_without_weights(folder), source, base.kind)
    trained = _read_trained(directory)
    shapes = {name: shape_of(tensor) for name, (_, tensor) in stored.items()}
    shapes |= {name: tuple(tensor.shape) for name, tensor in trained.items() if ".lora_" not in name}
    dtype = torch.bfloat16 if base.dtype == "bf16" else torch.float32

    def read(name: str) -> Tensor:
        if name in trained:
            return trained[name]
        weight: Tensor = stored[name][1][...]
        if weight.is_floating_point():
            weight = weight.to(dtype).float()
        down, up = (trained.get(f"{name.removesuffix('weight')}lora_{part}.weight") for part in "AB")
        return weight if down is None or up is None else merge(weight, down, up, base.scaling)

    return {name: 4 * prod(shape) for name, shape in shapes.items()}, lambda names: {name: read(name) for name in names}


def _read_trained(directory: Path) -> dict[str, Tensor]:
    return read_weights(directory, [*stored_weights(directory)])
