"""The memory of an engine of vLLM on one rank, awake and asleep, in bytes."""

from controller.memory.group import Group
from controller.memory.passes import compute_bytes
from controller.memory.terms import GIB
from splitppo.config import Config

# What a vLLM engine keeps on a GPU while it sleeps: it gives back weights and KV cache, and nothing else. Not measured
# here. Others report 0.8 GiB for 1 B parameters on one GPU and 2.4 to 7.4 on each of two
# (github.com/NVIDIA-NeMo/RL/issues/223), and on each of eight 7 GiB (github.com/vllm-project/vllm/issues/47654), of
# which 1.5 are graphs and 1 is communicators (github.com/vllm-project/vllm/pull/46234).
VLLM_WORKSPACE_BYTES = GIB
VLLM_GRAPH_BYTES = GIB
VLLM_COMMUNICATOR_BYTES = 3 * GIB
_CPU_KV_CACHE_GB = 1.0  # where rollout.vllm.kv_cache_gb is not set


def has_vllm(group: Group) -> bool:
    """Returns True if the group samples with vLLM."""
    return group.config.rollout.backend == "vllm" and group.role in group.config.sampling_roles


def sleeps(group: Group) -> bool:
    """Returns True if the group's engine gives weights and KV cache back while the group does something else."""
    return has_vllm(group) and bool(group.devices) and group.config.rollout.vllm.sleep_level != 0


def awake_bytes(group: Group) -> int:
    """Returns the bytes of vLLM while it samples.

    on a GPU:                   gpu_memory_utilization x its memory
    with rollout.vllm.kv_cache_gb, or a GPU of unknown memory:
                                c P / tensor_model_parallel_size + kv_cache_gb + `asleep_bytes`
    on a CPU:                   c P / tensor_model_parallel_size + kv_cache_gb, which is 1 GiB if not set
    """
    settings = group.config.rollout.vllm
    if settings.kv_cache_gb is None and group.devices and group.gpu_bytes is not None:
        return int(settings.gpu_memory_utilization * group.gpu_bytes)
    default_gb = 0.0 if group.devices else _CPU_KV_CACHE_GB
    kv_cache = int((settings.kv_cache_gb or default_gb) * GIB)
    kept = asleep_bytes(group.config) if group.devices else 0
    return weights_bytes(group) + kv_cache + kept


def weights_bytes(group: Group) -> int:
    """Returns the bytes of the policy in the engine of one rank: c P / tensor_model_parallel_size."""
    config = group.config
    all_weights = compute_bytes(config.actor) * group.model.num_parameters
    return all_weights // config.rollout.vllm.tensor_model_parallel_size


def asleep_bytes(config: Config) -> int:
    """Returns the bytes that vLLM keeps on a GPU while it sleeps: work space, CUDA graphs, communicators."""
    settings = config.rollout.vllm
    graphs = 0 if settings.enforce_eager else VLLM_GRAPH_BYTES
    communicators = VLLM_COMMUNICATOR_BYTES if settings.tensor_model_parallel_size > 1 else 0
    return VLLM_WORKSPACE_BYTES + graphs + communicators
