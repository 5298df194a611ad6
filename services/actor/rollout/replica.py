"""Ranks that share one engine (tensor parallelism): neighbours in the actor's group, led by the lowest of them.

The shell gives all rows of a replica to its leader. The others get a copy here, run the same engine steps, and throw
their copy of the results away.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from services.actor.rollout.protocol import PromptRows
from splitppo.batch import Array, Column

_NUMBERS = np.dtype(np.int64)


class Replica:
    """This rank's place among those that share its engine. Every rank of the actor's group makes one, together.

    Args:
        rank, world_size: of the actor's group.
        num_ranks: ranks per engine; divides world_size.
    """

    def __init__(self, rank: int, world_size: int, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self._leader = rank - rank % num_ranks
        self.is_leader = rank == self._leader
        self._group: dist.ProcessGroup | None = None
        if num_ranks == 1:
            return
        for first in range(0, world_size, num_ranks):
            group = dist.new_group(list(range(first, first + num_ranks)), backend="gloo")
            if first == self._leader:
                self._group = group

    def share(self, rows: PromptRows) -> PromptRows:
        """The leader's rows, on all of its ranks."""
        if self._group is None:
            return rows
        prompts, seeds = Column.from_rows(rows.prompts, _NUMBERS), Column.from_rows(rows.seeds, _NUMBERS)
        parts = (prompts.lengths.astype(_NUMBERS), seeds.lengths.astype(_NUMBERS), prompts.values, seeds.values)
        sizes = self._broadcast(np.array([len(rows.prompts), len(prompts.values), len(seeds.values)], _NUMBERS))
        num_prompts, num_tokens, num_seeds = sizes.tolist()
        lengths = (num_prompts, num_prompts, num_tokens, num_seeds, num_prompts)
        numbers = np.concatenate([*parts, rows.groups]) if self.is_leader else np.empty(sum(lengths), _NUMBERS)
        prompt_lengths, num_samples, tokens, seed_values, groups = np.split(
            self._broadcast(numbers), np.cumsum(lengths)[:-1]
        )
        return PromptRows(_rows(tokens, prompt_lengths), _rows(seed_values, num_samples), groups)

    def agree(self, wish: bool) -> bool:
        """The leader's wish, on all of its ranks."""
        if self._group is None:
            return wish
        return bool(self._broadcast(np.array([wish], _NUMBERS))[0])

    def _broadcast(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """The leader's numbers; elsewhere only the shape of the argument matters."""
        tensor = torch.from_numpy(np.ascontiguousarray(numbers, _NUMBERS))
        if len(tensor):
            dist.broadcast(tensor, self._leader, group=self._group)
        return tensor.numpy()


def _rows(values: NDArray[np.int64], lengths: NDArray[np.int64]) -> list[Array]:
    return Column(values, lengths.astype(np.int32)).rows()
