"""The mesh of a group: which ranks divide the weights, which hold copies of each other (HSDP), which share rows."""

from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Self

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

# A rank waits as long as another one writes a checkpoint; the watch over peers notices a dead rank at once.
_GROUP_TIMEOUT = timedelta(days=7)


@dataclass(frozen=True)
class GroupMesh:
    """The ranks of a group in `replicate` rows of `shard` neighbours, in the order of their numbers.

    The ranks of a row divide the weights among them. Neighbours are on the same machine if `shard` is at most the
    number of ranks there. The rows hold equal weights; only gradients go from row to row. Each `sequence` neighbours
    of a row compute the same rows of batches, each its own positions of them.
    """

    replicate: int
    shard: int
    sequence: int = 1

    @classmethod
    def of(cls, num_ranks: int, fsdp_size: int = -1, sequence: int = 1) -> Self:
        """Returns the mesh of a group whose rows have `fsdp_size` ranks (-1: one row); ValueError if it has a rest."""
        shard = num_ranks if fsdp_size == -1 else fsdp_size
        if shard < 1 or num_ranks % shard:
            raise ValueError(f"fsdp_size ({fsdp_size}) must divide the number of ranks ({num_ranks}), or be -1")
        if shard % sequence:
            raise ValueError(f"ulysses_sequence_parallel_size ({sequence}) must divide {shard} ranks")
        return cls(num_ranks // shard, shard, sequence)

    @property
    def num_ranks(self) -> int:
        return self.replicate * self.shard

    def device_mesh(self, device_type: str) -> DeviceMesh:
        """Makes torch's mesh of this group: (replicate, shard), or without replicas (shard); all ranks call it."""
        if self.replicate == 1:
            return init_device_mesh(device_type, (self.shard,))
        ranks = torch.arange(self.num_ranks).view(self.replicate, self.shard)
        new_subgroups: Any = dist.new_subgroups_by_enumeration  # returns this rank's process group, and all of them
        replicate_group, _ = new_subgroups(ranks.T.tolist(), timeout=_GROUP_TIMEOUT)
        shard_group, _ = new_subgroups(ranks.tolist(), timeout=_GROUP_TIMEOUT)
        return DeviceMesh.from_group(
            [replicate_group, shard_group], device_type, ranks, mesh_dim_names=("replicate", "shard")
        )

    def sequence_group(self) -> dist.ProcessGroup | None:
        """Makes the process group of the ranks that share this one's rows, None if none do; all ranks call it."""
        if self.sequence == 1:
            return None
        neighbours = torch.arange(self.num_ranks).view(-1, self.sequence).tolist()
        group: dist.ProcessGroup = dist.new_subgroups_by_enumeration(neighbours, timeout=_GROUP_TIMEOUT)[0]  # type: ignore[no-untyped-call]
        return group
