"""Translates names of weights between a model in memory and files, for experts, and for models that read images.

The names and the order of an expert's parts are those of transformers. A published checkpoint and vLLM have, e.g.,

    mlp.experts.0.gate_proj.weight [I, D], mlp.experts.0.up_proj.weight [I, D], mlp.experts.1.gate_proj.weight, ...

where the model has mlp.experts.gate_up_proj [E, 2 I, D], for E experts of width I and hidden size D. Qwen2.5-VL's files
have `visual` and `model.layers` where the model has `model.visual` and `model.language_model.layers`.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, get_model_conversion_mapping
from transformers.core_model_loading import MergeModulelist, WeightConverter, WeightRenaming

from services.engine.model.weight_files import StoredTensor, shape_of
from splitppo.images.settings import FAMILIES


@dataclass(frozen=True)
class StackedExperts:
    """The parts of all experts of a layer in files, read by slices as the tensor that the model has: a `StoredTensor`.

    Raises:
        ValueError: the experts differ in their shapes.
    """

    name: str
    experts: Sequence[Sequence[StoredTensor]]

    def __post_init__(self) -> None:
        if len({tuple(map(shape_of, parts)) for parts in self.experts}) != 1:
            raise ValueError(f"expected experts of the same shapes for {self.name}, found different ones")

    def get_shape(self) -> list[int]:
        """Returns the shape of the stacked tensor: experts, rows of all parts of an expert, columns."""
        shapes = [shape_of(part) for part in self.experts[0]]
        return [len(self.experts), sum(rows for rows, *_ in shapes), *shapes[0][1:]]

    def __getitem__(self, experts: Any) -> Tensor:
        """Reads a slice of the experts, or with `...` all of them."""
        chosen = self.experts if experts is ... else self.experts[experts]
        rows = torch.cat([part[:] for parts in chosen for part in parts])
        return rows.reshape(len(chosen), *self.get_shape()[1:])


@dataclass(frozen=True)
class FileNames:
    """The names in files of the weights of a model that stacks experts, or reads images; all others stay as they are.

    Attributes:
        parts: by the end of a stacked weight's name, the ends of the names of an expert's parts, with * for its number.
        renamings: changes of other names, in the order in which transformers makes them.
    """

    parts: Mapping[str, Sequence[str]]
    renamings: Sequence[WeightRenaming]

    @classmethod
    def of(cls, model: Any) -> Self:
        """Reads the names from transformers' table of architectures; the model may be sharded."""
        changes = get_model_conversion_mapping(model, add_legacy=False)
        parts = {
            change.target_patterns[0]: [part.replace(r"\.", ".") for part in change.source_patterns]
            for change in changes
            if isinstance(change, WeightConverter) and isinstance(change.operations[0], MergeModulelist)
        }
        if model.config.model_type in FAMILIES:  # they are listed by their class, whose name changes with sharding
            of_names = get_checkpoint_conversion_mapping(model.config.architectures[0]) or []
        else:
            of_names = changes if parts else []
        renamings = [change for change in of_names if type(change) is WeightRenaming]
        return cls(parts, [change.reverse_transform() for change in reversed(renamings)])

    def find(self, source: Mapping[str, StoredTensor], name: str) -> StoredTensor | None:
        """Finds a weight of the model, by its name there, in the tensors of files; None if they lack it.

        Raises:
            ValueError: the files lack a part of an expert.
        """
        if name in source:
            return source[name]
        if not (parts := self._parts(name)):
            return source.get(self._renamed(name))
        experts: list[list[StoredTensor]] = []
        while any(part in source for part in _of_expert(len(experts), parts)):
            names = _of_expert(len(experts), parts)
            if lacking := [part for part in names if part not in source]:
                raise ValueError(f"expected {lacking[0]} in its weights, found none")
            experts.append([source[part] for part in names])
        return StackedExperts(name, experts) if experts else None

    def unstack(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yields (name in files, tensor) for each of a model's whole weights; parts of experts are views."""
        for name, weight in weights:
            if parts := self._parts(name):
                for number, expert in enumerate(weight):
                    yield from zip(_of_expert(number, parts), expert.chunk(len(parts)), strict=True)
            else:
                yield self._renamed(name), weight

    def names(self, name: str, num_experts: int) -> list[str]:
        """Returns the names in files of a weight of the model: one, or those of the parts of a layer's experts."""
        if not (parts := self._parts(name)):
            return [self._renamed(name)]
        return [part for number in range(num_experts) for part in _of_expert(number, parts)]

    def _parts(self, name: str) -> list[str]:
        """Returns the names in files of an expert's parts, with * for its number; none for any other weight."""
        end = next((end for end in self.parts if name.endswith(end)), None)
        return [self._renamed(f"{name.removesuffix(end)}{part}") for part in self.parts[end]] if end else []

    def _renamed(self, name: str) -> str:
        for change in self.renamings:
            name, _ = change.rename_source_key(name)
        return str(name)


def _of_expert(number: int, parts: Sequence[str]) -> list[str]:
    return [part.replace("*", str(number)) for part in parts]
