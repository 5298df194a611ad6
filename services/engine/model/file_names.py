"""Translates names of weights between a model in memory, which stacks the experts of a layer, and files, which do not.

The names and the order of an expert's parts are those of transformers. A published checkpoint and vLLM have, e.g.,

    mlp.experts.0.gate_proj.weight [I, D], mlp.experts.0.up_proj.weight [I, D], mlp.experts.1.gate_proj.weight, ...

where the model has mlp.experts.gate_up_proj [E, 2 I, D], for E experts of width I and hidden size D.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import MergeModulelist, PrefixChange, WeightConverter, WeightRenaming

from services.engine.model.weight_files import StoredTensor, shape_of


@dataclass(frozen=True)
class StackedExperts:
    """The parts of all experts of a layer in files, read by slices as the tensor that the model has: a `StoredTensor`.

    Raises:
        ValueError: the experts differ in their shapes.
    """

    experts: Sequence[Sequence[StoredTensor]]

    def __post_init__(self) -> None:
        if len({tuple(map(shape_of, parts)) for parts in self.experts}) != 1:
            raise ValueError("expected all experts of a layer to have the same shapes")

    def get_shape(self) -> list[int]:
        """Returns the shape of the stacked tensor: experts, rows of all parts of an expert, columns."""
        shapes = [shape_of(part) for part in self.experts[0]]
        return [len(self.experts), sum(rows for rows, *_ in shapes), *shapes[0][1:]]

    def __getitem__(self, experts: Any) -> Tensor:
        """Reads a slice of the experts, or with `...` all of them."""
        chosen = self.experts if experts is ... else self.experts[experts]
        return torch.cat([part[:] for parts in chosen for part in parts]).unflatten(0, (len(chosen), -1))


@dataclass(frozen=True)
class FileNames:
    """The names in files of the weights of a model that stacks experts; those of any other model stay as they are.

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
        renamings = [change for change in changes if type(change) is WeightRenaming and parts]
        return cls(parts, [change.reverse_transform() for change in reversed(renamings)])

    def find(self, source: Mapping[str, StoredTensor], name: str, shape: Sequence[int]) -> StoredTensor | None:
        """Finds a weight of the model among the tensors of files, which may be stacked already; None if it lacks."""
        if name in source:
            return source[name]
        names = self._of_experts(name, shape[0] if shape else 0) or [[self._renamed(name)]]
        if not all(part in source for parts in names for part in parts):
            return None
        stored = [[source[part] for part in parts] for parts in names]
        return StackedExperts(stored) if self._end(name) else stored[0][0]

    def unstack(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yields (name in files, tensor) for each of a model's whole weights; parts of experts are views."""
        for name, weight in weights:
            if self._end(name):
                for names, expert in zip(self._of_experts(name, len(weight)), weight, strict=True):
                    yield from zip(names, expert.chunk(len(names)), strict=True)
            else:
                yield self._renamed(name), weight

    def _end(self, name: str) -> str:
        """Returns the key of `parts` with which a stacked weight's name ends; an empty text for any other weight."""
        return next((end for end in self.parts if name.endswith(end)), "")

    def _of_experts(self, name: str, num_experts: int) -> list[list[str]]:
        end = self._end(name)
        begin = name.removesuffix(end)
        parts = [self._renamed(f"{begin}{part}") for part in self.parts.get(end, ())]
        return [[part.replace("*", str(expert)) for part in parts] for expert in range(num_experts if parts else 0)]

    def _renamed(self, name: str) -> str:
        for change in self.renamings:
            name, _ = change.rename_source_key(name)
        return str(name)
