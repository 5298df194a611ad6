"""Estimates the memory of one rank in each phase of a step: what the engine always keeps, and what the phase adds.

`passes` has the legend of the formulas.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import ceil

from controller.memory.model_shape import ModelShape
from controller.memory.passes import (
    backward,
    compute_bytes,
    forward_only,
    kv_cache_bytes,
    layer_transients,
    micro_batch_of,
    training_gathered,
)
from splitppo.config import ComputedModelConfig, Config, TrainedModelConfig
from splitppo.config.section import RoleName, TrainedRoleName
from splitppo.config.sections.services import ServiceConfig
from splitppo.machine.memory_limits import MAX_FILE_BYTES

GIB = 1 << 30
# The memory of a rank without a model. On a CPU: Python, torch and transformers in anonymous memory, as measured by
# benchmarks.memory. On a GPU: the CUDA context, work space of libraries and buffers of NCCL; not measured.
CPU_PROCESS_BYTES, GPU_PROCESS_BYTES = 300 << 20, GIB
AT_REST = "at rest"  # the phase in which another group computes on the same GPUs
_LABELS = {"kv_cache": "KV cache", "vllm": "vLLM"}


def label(term: str) -> str:
    """Returns the name of a part of the memory for people: "KV cache" for "kv_cache"."""
    return _LABELS.get(term, term.replace("_", " "))


@dataclass(frozen=True)
class Terms:
    """The memory of one rank in one phase, divided into parts: bytes of weights, gradients, activations and so on."""

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    reference: int = 0
    reward_model: int = 0
    gathered_weights: int = 0
    kv_cache: int = 0
    activations: int = 0
    logits: int = 0
    vllm: int = 0
    checkpoint: int = 0
    offloaded: int = 0
    process: int = 0

    @property
    def total(self) -> int:
        return sum(vars(self).values())

    @property
    def largest(self) -> str:
        """The name of the part that needs most bytes."""
        return max(vars(self), key=vars(self).__getitem__)


@dataclass(frozen=True)
class GroupMemory:
    """The memory of each rank of a worker group in each phase: memory of its GPU, or main memory on a CPU."""

    role: RoleName
    num_ranks: int
    devices: tuple[int, ...]  # GPU indices, one per rank; empty on a CPU
    phases: Mapping[str, Terms]
    saving: Terms | None = None  # main memory during a checkpoint, also on GPUs; None if the group saves nothing
    offloaded: Mapping[str, int] = field(default_factory=dict)  # bytes of main memory by key, e.g. actor.param_offload

    @property
    def peak_phase(self) -> str:
        """The name of the phase in which a rank needs most memory."""
        return max(self.phases, key=lambda name: self.phases[name].total)

    @property
    def peak(self) -> Terms:
        """The memory of a rank in the phase that needs most, divided into parts."""
        return self.phases[self.peak_phase]


def estimate_group(
    config: Config,
    role: TrainedRoleName,
    model: ModelShape,
    *,
    reference: ModelShape | None = None,
    reward_model: ModelShape | None = None,
    gpu_bytes: int | None = None,
) -> GroupMemory:
    """Estimates the memory of each rank of the worker group that trains the actor or the critic.

    In every phase there are the trained weights and the moments of AdamW, sharded, in fp32, and frozen weights in the
    compute dtype:

        weights (c P_f + 4 P_t) / G,   optimizer 8 P_t / G,   reference c P_ref / G,   reward_model c P_rm / G

    The reference of an actor with adapters is the actor without them, and takes 0. A term that is offloaded is 0 in
    phases that do not need it. Its copy in main memory stays there: on a CPU it is the term `offloaded`.

    Phases are "generate" (the actor, if its group samples), "log-probs" (the critic: "values"), "reference", "reward",
    "backward" (a micro-batch of an update, with its forward pass), "optimizer step" and "at rest" (between commands, if
    something is offloaded, or if a rollout group samples on the critic's GPUs). A checkpoint may be written during any
    of them: `saving` is the peak with the buffer of the checkpoint. All rows, also of the reward model, have
    the maximum length that data.max_prompt_length and max_response_length allow. Attention is taken to keep no scores
    in memory.

    Args:
        config: the configuration of the run.
        role: the role of the group.
        model: the shape of the role's model.
        reference: the shape of the reference; None if the group does not host it.
        reward_model: the shape of the reward model; None if the group does not host it.
        gpu_bytes: the memory of the group's smallest GPU, of which vLLM takes a share; None if not known.
    """
    service, trained = config.services.of(role), config.trained_model_of(role)
    model = model.with_adapters(trained)
    num_ranks, bytes_each, shards = service.num_processes, compute_bytes(trained), num_shards(trained, service)
    is_own_reference = role == "actor" and trained.lora_rank > 0
    other_reference = 0 if reference is None or is_own_reference else reference.num_parameters
    vllm = _vllm_bytes(config, role, model, gpu_bytes) if config.rollout.backend == "vllm" else 0
    sleeps = bool(service.devices) and config.rollout.vllm.sleep_level > 0
    kept = Terms(
        weights=(bytes_each * model.num_frozen + 4 * model.num_trained) // shards,
        optimizer=8 * model.num_trained // shards,
        reference=compute_bytes(config.actor) * other_reference // shards,  # the actor's first model
        reward_model=compute_bytes(config.reward_model) * reward_model.num_parameters // shards if reward_model else 0,
        vllm=vllm if role in config.samplers and not sleeps else 0,
        process=GPU_PROCESS_BYTES if service.devices else CPU_PROCESS_BYTES,
    )
    offloaded = {key: getattr(kept, term) for key, term in _offload_keys(config, role).items()}
    kept = replace(kept, offloaded=0 if service.devices else sum(offloaded.values()))

    def needing(*terms: str) -> Terms:
        return replace(kept, **{term: 0 for term in _offload_keys(config, role).values() if term not in terms})

    phases = {}
    if role in config.samplers:
        sampling = _generation(config, role, model, replace(needing("weights"), vllm=vllm))
        if vllm and sleeps:  # it gets the weights before it has a KV cache
            weights = bytes_each * model.num_parameters // config.rollout.vllm.tensor_model_parallel_size
            loading, sampling = replace(sampling, vllm=weights), replace(sampling, weights=needing().weights)
            sampling = max(sampling, loading, key=lambda terms: terms.total)
        phases["generate"] = sampling
    is_ddp = trained.strategy == "ddp"
    wraps = (num_ranks > 1 and not is_ddp) or trained.dtype == "bf16"
    gathered = training_gathered(model, bytes_each) if wraps else 0
    forward = _forward_phase(config, role, trained, model, needing("weights"), has_logits=role == "actor")
    phases["log-probs" if role == "actor" else "values"] = replace(forward, gathered_weights=gathered)
    if reference:
        present = needing("weights" if is_own_reference else "reference")
        phases["reference"] = _forward_phase(config, role, config.actor, reference, present, has_logits=True)
    if reward_model:
        present = needing("reward_model")
        phases["reward"] = _forward_phase(config, role, config.reward_model, reward_model, present, has_logits=False)
    assert trained.ppo_mini_batch_size is not None, "load resolves it"
    mini_batch = micro_batch_of(config, role, trained, trained.ppo_mini_batch_size)
    phases["backward"] = max(
        (
            replace(needing("weights"), gathered_weights=gathered, **terms)
            for terms in backward(model, mini_batch, trained, shards if wraps else None, is_policy=role == "actor")
        ),
        key=lambda terms: terms.total,
    )
    phases["optimizer step"] = replace(needing("weights", "optimizer"), gradients=4 * model.num_trained // shards)
    if offloaded or (role in config.roles_in_turns and config.gpus_in_turns):
        phases[AT_REST] = needing()
    memory = GroupMemory(role, num_ranks, service.devices, phases, offloaded=offloaded)
    on_host = Terms(offloaded=sum(offloaded.values()), process=CPU_PROCESS_BYTES) if service.devices else memory.peak
    checkpoint = _checkpoint_bytes(model, shards, with_hf_model=config.checkpoint.save_hf_model)
    return replace(memory, saving=replace(on_host, checkpoint=checkpoint))


def num_shards(trained: TrainedModelConfig, service: ServiceConfig) -> int:
    """Returns the number of ranks of a group that hold one copy of the weights together."""
    if trained.strategy == "ddp":
        return 1
    return service.num_processes if trained.fsdp_size == -1 else trained.fsdp_size


def _offload_keys(config: Config, role: RoleName) -> Mapping[str, str]:
    """Returns the keys that are set to offload memory of a group, with the names of the terms of `Terms`."""
    keys = {}
    if role in config.trained_roles:
        trained = config.trained_model_of(role)
        keys[f"{role}.param_offload"] = trained.param_offload, "weights"
        keys[f"{role}.optimizer_offload"] = trained.optimizer_offload, "optimizer"
    if role == config.reference_host:
        keys["placement.reference_param_offload"] = config.placement.reference_param_offload, "reference"
    if role == config.reward_model_host:
        keys["reward_model.param_offload"] = config.reward_model.param_offload, "reward_model"
    return {key: term for key, (is_set, term) in keys.items() if is_set}


def _checkpoint_bytes(model: ModelShape, shards: int, *, with_hf_model: bool) -> int:
    """Returns the bytes of main memory that rank 0 needs to write a checkpoint during training; others need no more.

    a tensor at a time:  4 T / G, T the weights of the embedding or of a layer, whichever is more; with adapters P_t / L
    huggingface/:        min(4 P_t, max(MAX_FILE_BYTES, 4 T)), and where G > 1 the tensor whose shards are joined, 4 T
    """
    largest = 4 * max(model.vocabulary * model.hidden, model.layer_parameters)
    if model.num_frozen:
        largest = 4 * model.num_trained // model.num_layers
    if not with_hf_model:
        return largest // shards
    joined = largest if shards > 1 else 0
    return min(4 * model.num_trained, max(MAX_FILE_BYTES, largest)) + joined


def estimate_reward_group(config: Config, model: ModelShape) -> GroupMemory:
    """Estimates the memory of each rank of a worker group that has only the reward model."""
    service, bytes_each = config.services.reward, compute_bytes(config.reward_model)
    kept = Terms(
        reward_model=bytes_each * model.num_parameters // service.num_processes,
        process=GPU_PROCESS_BYTES if service.devices else CPU_PROCESS_BYTES,
    )
    offloaded = dict.fromkeys(_offload_keys(config, "reward"), kept.reward_model)
    kept = replace(kept, offloaded=0 if service.devices else sum(offloaded.values()))
    phases = {"reward": _forward_phase(config, "reward", config.reward_model, model, kept, has_logits=False)}
    if offloaded:
        phases[AT_REST] = replace(kept, reward_model=0)
    return GroupMemory("reward", service.num_processes, service.devices, phases, offloaded=offloaded)


def estimate_rollout_group(config: Config, model: ModelShape, gpu_bytes: int | None = None) -> GroupMemory:
    """Estimates the memory of each rank of a worker group that only samples, with weights that the actor publishes.

    Every rank has whole weights, c P, with rollout.backend hf; with vllm, its share of an engine. Published files are
    mapped, and count as no memory. On GPUs of the critic, the phase "at rest" has neither: the engine sleeps.
    `gpu_bytes` is that of `estimate_group`.
    """
    service, is_vllm = config.services.of("rollout"), config.rollout.backend == "vllm"
    kept = Terms(
        weights=0 if is_vllm else compute_bytes(config.actor) * model.num_parameters,
        vllm=_vllm_bytes(config, "rollout", model, gpu_bytes) if is_vllm else 0,
        process=GPU_PROCESS_BYTES if service.devices else CPU_PROCESS_BYTES,
    )
    phases = {"generate": _generation(config, "rollout", model, kept)}
    if config.gpus_in_turns:
        phases[AT_REST] = Terms(process=kept.process)
    return GroupMemory("rollout", service.num_processes, service.devices, phases)


def _forward_phase(
    config: Config, role: RoleName, computed: ComputedModelConfig, model: ModelShape, kept: Terms, *, has_logits: bool
) -> Terms:
    """Returns the memory of a rank in a forward pass without gradients; on several ranks weights are gathered."""
    bytes_each = compute_bytes(computed)
    everything = micro_batch_of(config, role, computed, config.data.train_batch_size)
    is_ddp = role in config.trained_roles and config.trained_model_of(role).strategy == "ddp"
    is_gathered = config.services.of(role).num_processes > 1 and not is_ddp
    return replace(
        kept,
        gathered_weights=training_gathered(model, bytes_each) if is_gathered else 0,
        **forward_only(model, everything, bytes_each, has_logits=has_logits),
    )


def _generation(config: Config, role: RoleName, model: ModelShape, kept: Terms) -> Terms:
    """Returns the memory of a rank while it samples: gathering of weights, prefill or decoding, whichever needs most.

    gathering: first the weights in no layer; a unit is there twice, and its shard in the compute dtype; a rollout group
               gathers nothing
    prefill:   c U M (2 D + 3 I + 2 H) + (1 + c) U M^2         for U different prompts of M tokens
    decoding:  the whole KV cache, and `_sampling_bytes` for each of the rows x V logits
    """
    data, rollout, num_ranks = config.data, config.rollout, config.services.of(role).num_processes
    bytes_each, is_ddp = compute_bytes(config.actor), config.actor.strategy == "ddp"
    wraps = role == "actor" and ((num_ranks > 1 and not is_ddp) or config.actor.dtype == "bf16")
    if rollout.backend == "vllm":  # it copies one tensor at a time
        return replace(kept, gathered_weights=bytes_each * model.vocabulary * model.hidden if wraps else 0)
    shards = num_shards(config.actor, config.services.of(role))
    root, layer = ((1 + 1 / shards) * unit for unit in (model.root_parameters, model.layer_parameters))
    gathering = bytes_each * max(model.root_parameters + root, model.num_parameters + layer)
    gathering_terms = replace(kept, gathered_weights=int(gathering) if wraps else 0)
    kept = replace(kept, gathered_weights=bytes_each * model.num_parameters if wraps else 0)
    shares = {"rollout": float(rollout.share), "actor": 1.0 - float(rollout.share)}
    share = shares[role] if len(config.samplers) > 1 else 1.0
    waiting = ceil(data.draw_size * share / num_ranks) * rollout.n
    if data.val_files:
        waiting = max(waiting, ceil(config.evaluation.batch_size * share / num_ranks) * config.evaluation.n)
    rows = min(rollout.max_batch_size, waiting)
    prompts = rows if data.val_files else ceil(rows / rollout.n)
    tokens = prompts * data.max_prompt_length
    attention = bytes_each * tokens * 2 * model.attention + (1 + bytes_each) * tokens * data.max_prompt_length
    prefill = replace(
        kept,
        kv_cache=kv_cache_bytes(model, prompts, data.max_prompt_length, bytes_each),
        activations=layer_transients(model, tokens, bytes_each) + attention,
    )
    decoding = replace(
        kept,
        kv_cache=kv_cache_bytes(model, rows, data.longest_row, bytes_each),
        logits=rows * model.vocabulary * _sampling_bytes(config),
    )
    return max(gathering_terms, prefill, decoding, key=lambda terms: terms.total)


def _sampling_bytes(config: Config) -> int:
    """Returns the bytes of memory for each logit while a token is sampled.

    These are the logit in the compute dtype, its exponential in fp32 and its sum in fp64; for bf16, or a temperature
    other than 1, a copy in fp32; and what top-k and top-p sort.
    """
    rollout = config.rollout
    cut = 4 + 8 + 8 + 8 + 4 if rollout.top_p < 1.0 else 4 + 8 if rollout.top_k else 0
    widened = 4 if config.actor.dtype == "bf16" or rollout.temperature != 1.0 else 0
    return compute_bytes(config.actor) + widened + 4 + 8 + cut


def _vllm_bytes(config: Config, role: RoleName, model: ModelShape, gpu_bytes: int | None) -> int:
    """Returns the bytes of vLLM's weights and KV cache: a share of the GPU, or weights and rollout.vllm.kv_cache_gb."""
    settings, on_gpu = config.rollout.vllm, bool(config.services.of(role).devices)
    if settings.kv_cache_gb is None and on_gpu and gpu_bytes is not None:
        return int(settings.gpu_memory_utilization * gpu_bytes)
    weights = compute_bytes(config.actor) * model.num_parameters // settings.tensor_model_parallel_size
    default_gb = 0.0 if on_gpu else 1.0
    return weights + int((settings.kv_cache_gb or default_gb) * GIB)
