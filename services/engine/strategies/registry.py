"""Maps values of `actor.strategy` and `critic.strategy` to strategies; other modules need not know which one holds."""

from collections.abc import Callable, Mapping

import torch

from services.engine import parallel
from services.engine.mesh import GroupMesh
from services.engine.strategies.ddp import Ddp
from services.engine.strategies.fsdp2 import Fsdp2
from services.engine.strategies.protocol import Strategy
from splitppo.config import TrainedModelConfig

# Called on all ranks together, before any model of the group is built.
STRATEGIES: Mapping[str, Callable[[GroupMesh, torch.device], Strategy]] = {
    "fsdp2": Fsdp2,
    "ddp": Ddp,
}


def build_strategy(device: torch.device, config: TrainedModelConfig | None = None) -> Strategy:
    """Makes the strategy of this rank's group, by the section of the model that the group trains.

    Without a section, FSDP2 divides the weights over all ranks. All models of a group share one strategy.

    Raises:
        ValueError: `fsdp_size` does not divide the number of ranks.
    """
    if config is None:
        return Fsdp2(GroupMesh.of(parallel.num_ranks()), device)
    return STRATEGIES[config.strategy](mesh_of(config), device)


def mesh_of(config: TrainedModelConfig) -> GroupMesh:
    """Returns the mesh of this rank's group; ValueError if its sizes do not divide the number of ranks."""
    return GroupMesh.of(parallel.num_ranks(), config.fsdp_size, config.ulysses_sequence_parallel_size)
