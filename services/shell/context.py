"""What a process of a group knows about its place in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch.distributed import ProcessGroup

from splitppo.config import Config, ServiceConfig

RoleName = Literal["actor", "critic"]


@dataclass(frozen=True)
class RankContext:
    """One rank of a torchrun group; given to whoever builds the role.

    Attributes:
        role_name: "actor" or "critic"; the name of its sections in the configuration.
        rank, world_size: over all nodes of the group.
        local_rank: on this node.
        device: where this rank computes; already the current CUDA device where it is one.
        control_group: gloo, for the shell alone.
        config: the whole configuration of the run.
        parts_group: gloo, for the shell's threads: what ranks send while a command runs. None in a group of one.
    """

    role_name: RoleName
    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    control_group: ProcessGroup
    config: Config
    parts_group: ProcessGroup | None = None

    @property
    def service(self) -> ServiceConfig:
        """The configuration of this group's placement."""
        service: ServiceConfig = getattr(self.config.services, self.role_name)
        return service
