"""A worker group as its memory depends on it: models, ranks and devices; `passes` has the legend of the formulas."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from controller.memory.frozen_models import FROZEN_MODELS
from controller.models.shape import ModelShape
from splitppo.config import ComputedModelConfig, Config, TrainedModelConfig
from splitppo.config.section import RoleName


@dataclass(frozen=True)
class Group:
    """A worker group whose memory is estimated.

    Attributes:
        config: the configuration of the run.
        role: the role of the group.
        model: the shape of its main model, with adapters if it trains some.
        frozen: the shapes of the frozen models that it holds, by their names in `FROZEN_MODELS`.
        gpu_bytes: the memory of its smallest GPU, of which vLLM takes a share; None if not known.
        image_bytes: the size of the files of a prompt's images, on average; None if not known.
    """

    config: Config
    role: RoleName
    model: ModelShape
    frozen: Mapping[str, ModelShape]
    gpu_bytes: int | None
    image_bytes: int | None = None

    @property
    def trained(self) -> TrainedModelConfig | None:
        """The section of the model that the group trains; None if it trains none."""
        return self.config.trained_model_of(self.role) if self.role in self.config.trained_roles else None

    @property
    def num_ranks(self) -> int:
        return self.config.services.of(self.role).num_processes

    @property
    def devices(self) -> tuple[int, ...]:
        """The indices of its GPUs, one per rank; empty on a CPU."""
        return self.config.services.of(self.role).devices

    @property
    def num_shards(self) -> int:
        """The number of ranks that hold one copy of the weights together: G."""
        return num_shards(self.config, self.role)

    @property
    def gathers_frozen(self) -> bool:
        """True if the weights of a frozen model are divided among ranks, which gather them to compute."""
        return self.num_ranks > 1 and not (self.trained and self.trained.strategy == "ddp")

    @property
    def gathers_trained(self) -> bool:
        """True if a rank gathers the trained weights to compute: they are divided, or kept in fp32 to compute bf16."""
        return self.trained is not None and (self.gathers_frozen or self.trained.dtype == "bf16")

    def without_images(self) -> "Group":
        """Returns the same group, whose models have the weights of a vision tower, but compute nothing with them."""
        frozen = {name: replace(model, tower=None) for name, model in self.frozen.items()}
        return replace(self, model=replace(self.model, tower=None), frozen=frozen)

    def is_own_reference(self, name: str) -> bool:
        """Returns True for the reference of an actor with adapters, which is the actor without them."""
        return name == "reference" and self.role == "actor" and self.config.actor.lora_rank > 0

    def section_of(self, name: str) -> ComputedModelConfig:
        """Returns the section with dtype and micro-batches of the frozen model of this name."""
        section: ComputedModelConfig = getattr(self.config, FROZEN_MODELS[name].section)
        return section


def num_shards(config: Config, role: RoleName) -> int:
    """Returns the number of ranks of a group that hold one copy of the weights together."""
    num_ranks = config.services.of(role).num_processes
    if role not in config.trained_roles:
        return num_ranks
    trained = config.trained_model_of(role)
    if trained.strategy == "ddp":
        return 1
    return num_ranks if trained.fsdp_size == -1 else trained.fsdp_size
