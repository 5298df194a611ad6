"""The place of a process in its group, and the run that the group works for."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.distributed import ProcessGroup

from splitppo.config import Config
from splitppo.config.section import RoleName
from splitppo.v1 import worker_pb2


@dataclass(frozen=True)
class RankContext:
    """One rank of a torchrun group; given to whoever builds the role.

    Attributes:
        rank, world_size: over all nodes of the group.
        device: already the current CUDA device where it is one.
        control_group: gloo, for the runtime alone.
        parts_group: gloo, for the runtime's threads: what ranks send while a command runs. None in a group of one.
    """

    role_name: RoleName
    rank: int
    world_size: int
    device: torch.device
    control_group: ProcessGroup
    config: Config
    parts_group: ProcessGroup | None = None


class Members(NamedTuple):
    """All ranks of a group, and those whose processes run beside this rank."""

    processes: Sequence[worker_pb2.Process]
    same_node: Sequence[int]
    addresses: Mapping[int, str]  # empty on one node
