"""The facts that a rank of a torchrun group has about itself (rank, device, process groups) and the other ranks."""

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch.distributed import ProcessGroup

from splitppo.config import Config
from splitppo.config.section import RoleName
from splitppo.v1 import worker_pb2


@dataclass(frozen=True)
class RankContext:
    """The rank, device, process groups and configuration of one process, from which a role (actor, critic) is built.

    Attributes:
        rank, world_size: global, over all nodes of the torchrun group.
        device: where the rank computes; a CUDA device is already the current one.
        control_group: a gloo process group for the runtime alone.
        side_group: a gloo process group for what ranks send each other while a command runs; None in a group of one.
    """

    role_name: RoleName
    rank: int
    world_size: int
    device: torch.device
    control_group: ProcessGroup
    config: Config
    side_group: ProcessGroup | None = None

    @property
    def writer_locks(self) -> Sequence[Path]:
        """The files of which a rank locks one while it writes to storage; none without `checkpoint.max_writers`."""
        first = self.config.run.dir / "services" / f"writer_{socket.gethostname()}"
        return [Path(f"{first}_{number}.lock") for number in range(self.config.checkpoint.max_writers or 0)]


class Members(NamedTuple):
    """The process ids, nodes and IP addresses of all ranks of a torchrun group."""

    processes: Sequence[worker_pb2.Process]  # by rank
    same_node: Sequence[int]  # the ranks on the node of this one, itself included
    addresses: Mapping[int, str]  # IP address by rank; empty if the group has one node
