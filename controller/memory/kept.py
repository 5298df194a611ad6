"""Computes what a rank keeps in every phase: models, the moments of its optimizer and its process, in bytes."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from operator import attrgetter

from controller.memory import vllm
from controller.memory.frozen_models import frozen_models_of
from controller.memory.group import Group
from controller.memory.images import kept_images
from controller.memory.passes import compute_bytes
from controller.memory.terms import GIB, Terms
from splitppo.config import TrainedModelConfig

# The memory of a rank without a model. On a CPU: Python, torch and transformers in anonymous memory, as measured by
# benchmarks.memory. On a GPU: the CUDA context, work space of libraries and buffers of NCCL; not measured.
CPU_PROCESS_BYTES = 300 << 20
GPU_PROCESS_BYTES = GIB


@dataclass(frozen=True)
class Kept:
    """The memory that a rank keeps, and which parts of it wait in main memory while a phase does not need them.

    Attributes:
        everything: the memory of a phase that needs all of it.
        offloaded: bytes of main memory by key, e.g. actor.param_offload.
        offload_keys: the keys that are set to offload, with the name in `Terms` of what they offload.
    """

    everything: Terms
    offloaded: Mapping[str, int]
    offload_keys: Mapping[str, str]

    def needing(self, *terms: str) -> Terms:
        """Returns what a rank keeps in a phase that needs these terms: all terms but others that are offloaded."""
        away = {term: 0 for term in self.offload_keys.values() if term not in terms}
        return replace(self.everything, **away)


def kept_by(group: Group) -> Kept:
    """Computes what a rank of a group keeps.

        weights (c P_b + 4 (P - P_b)) / G,   optimizer 2 m P_t / G,   reference c P_ref / G,   reward_model c P_rm / G

    The reference of an actor with adapters is the actor without them, and takes 0. On a CPU the copies of what is
    offloaded are the term `offloaded`, since they are in the same memory.
    """
    models = _frozen_models(group) | _trained_model(group)
    engine = 0
    if vllm.has_vllm(group):
        engine = vllm.asleep_bytes(group.config) if vllm.sleeps(group) else vllm.awake_bytes(group)
    process = GPU_PROCESS_BYTES if group.devices else CPU_PROCESS_BYTES
    images = 0 if group.devices else kept_images(group)
    everything = Terms(**models, vllm=engine, images=images, process=process)
    keys = _offload_keys(group)
    offloaded = {key: getattr(everything, term) for key, term in keys.items()}
    beside = 0 if group.devices else sum(offloaded.values())
    return Kept(replace(everything, offloaded=beside), offloaded, keys)


def moment_bytes(trained: TrainedModelConfig) -> int:
    """Returns the bytes of one moment of AdamW for one weight: m."""
    return 4 if trained.optimizer_state_dtype == "fp32" else 2


def _trained_model(group: Group) -> dict[str, int]:
    """Returns the bytes of a rank's shard of the trained model: weights, and both moments of AdamW; {} without one.

    Weights under adapters are in the compute dtype, all others in fp32, those that `freeze` names among them.
    """
    if group.trained is None:
        return {}
    base_bytes = compute_bytes(group.trained) * group.model.num_base
    weights = (base_bytes + 4 * group.model.num_saved) // group.num_shards
    moments = 2 * moment_bytes(group.trained) * group.model.num_trained // group.num_shards
    return {"weights": weights, "optimizer": moments}


def _frozen_models(group: Group) -> dict[str, int]:
    """Returns the bytes of a rank's shard of each frozen model, by name, in its compute dtype.

    A reference that is the trained model without its adapters takes nothing.
    """
    return {
        name: compute_bytes(group.section_of(name)) * shape.num_parameters // group.num_shards
        for name, shape in group.frozen.items()
        if not group.is_own_reference(name)
    }


def _offload_keys(group: Group) -> Mapping[str, str]:
    """Returns the keys that are set to offload memory of a group, with the names of the terms of `Terms`."""
    trained = {f"{group.role}.param_offload": "weights", f"{group.role}.optimizer_offload": "optimizer"}
    frozen = {model.offload_key: name for name, model in frozen_models_of(group.config, group.role).items()}
    keys = (trained if group.trained else {}) | frozen
    return {key: term for key, term in keys.items() if attrgetter(key)(group.config)}
