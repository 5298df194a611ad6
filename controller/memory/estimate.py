"""Estimates the memory of one rank in each phase of a step: what the engine always keeps, and what the phase adds.

`passes` has the legend of the formulas.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import ceil
from operator import attrgetter

from controller.memory.frozen_models import FROZEN_MODELS, frozen_models_of
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
from splitppo.config.section import RoleName
from splitppo.machine.memory_limits import MAX_FILE_BYTES, MAX_MASK, MOMENT_BUCKET_BYTES, bucket_bytes_per_weight

GIB = 1 << 30
# The memory of a rank without a model. On a CPU: Python, torch and transformers in anonymous memory, as measured by
# benchmarks.memory. On a GPU: the CUDA context, work space of libraries and buffers of NCCL; not measured.
CPU_PROCESS_BYTES = 300 << 20
GPU_PROCESS_BYTES = GIB
# The memory that a vLLM engine keeps on a GPU while it sleeps: it gives back weights and KV cache, and nothing else.
# Not measured here. Others report 0.8 GiB for 1 B parameters on one GPU and 2.4 to 7.4 on each of two
# (github.com/NVIDIA-NeMo/RL/issues/223), and on each of eight 7 GiB (github.com/vllm-project/vllm/issues/47654), of
# which 1.5 are graphs and 1 is communicators (github.com/vllm-project/vllm/pull/46234).
VLLM_WORKSPACE_BYTES = GIB
VLLM_GRAPH_BYTES = GIB
VLLM_COMMUNICATOR_BYTES = 3 * GIB
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
    teacher: int = 0
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
    config: Config, role: RoleName, model: ModelShape, *, gpu_bytes: int | None = None, **frozen: ModelShape
) -> GroupMemory:
    """Estimates the memory of each rank of a worker group.

    In every phase there are the trained weights in fp32 and the moments of AdamW (m = 4 or 2 bytes each), sharded, and
    frozen weights in the compute dtype:

        weights (c P_f + 4 P_t) / G,   optimizer 2 m P_t / G,   reference c P_ref / G,   reward_model c P_rm / G

    The reference of an actor with adapters is the actor without them, and takes 0. A term that is offloaded is 0 in
    phases that do not need it. Its copy in main memory stays there: on a CPU it is the term `offloaded`. An optimizer
    step on moments that are offloaded or in bf16 has a bucket of them beside it, from main memory on a GPU two.

    Every rank of a rollout group has whole weights, c P, with rollout.backend hf; with vllm, its share of an engine.
    Published files are mapped, and count as no memory. On GPUs of the critic, the phase "at rest" has neither: the
    engine sleeps. A sleeping engine keeps its work space, CUDA graphs and communicators.

    Phases are "generate" (if the group samples), "log-probs" (the critic: "values"), those of frozen models, "backward"
    (a micro-batch of an update, with its forward pass), "optimizer step" and "at rest" (between commands, if something
    is offloaded, or if a rollout group samples on the critic's GPUs). A checkpoint may be written during any of them:
    `saving` is the peak with the buffer of the checkpoint. All rows, also of the reward model, have the maximum length
    that data.max_prompt_length and max_response_length allow. Attention is taken to keep no scores in memory.

    Args:
        config: the configuration of the run.
        role: the role of the group.
        model: the shape of the role's main model.
        gpu_bytes: the memory of the group's smallest GPU, of which vLLM takes a share; None if not known.
        frozen: the shapes of the frozen models that the group holds, by their names in `FROZEN_MODELS`.
    """
    group = _Group(config, role, model, gpu_bytes, frozen)
    service = group.service
    phases = dict(group.phases())
    if group.offloaded or (role in config.roles_in_turns and config.gpus_in_turns):
        phases[AT_REST] = group.needing()
    memory = GroupMemory(role, service.num_processes, service.devices, phases, offloaded=group.offloaded)
    if group.trained is None:
        return memory
    in_main_memory = Terms(offloaded=sum(group.offloaded.values()), process=CPU_PROCESS_BYTES)
    checkpoint = _checkpoint_bytes(group.model, group.shards, with_hf_model=config.checkpoint.save_hf_model)
    return replace(memory, saving=replace(in_main_memory if service.devices else memory.peak, checkpoint=checkpoint))


class _Group:
    """A worker group whose memory is estimated: what its ranks keep, and what each phase adds."""

    def __init__(
        self, config: Config, role: RoleName, model: ModelShape, gpu_bytes: int | None, frozen: Mapping[str, ModelShape]
    ) -> None:
        self.config = config
        self.role = role
        self.frozen = frozen
        self.service = config.services.of(role)
        self.trained = trained = config.trained_model_of(role) if role in config.trained_roles else None
        self.model = model.with_adapters(trained) if trained else model
        self.shards = num_shards(config, role)
        self.is_divided = self.service.num_processes > 1 and not (trained and trained.strategy == "ddp")
        self.is_wrapped = trained is not None and (self.is_divided or trained.dtype == "bf16")
        has_engine = config.rollout.backend == "vllm" and role in config.samplers
        self.vllm = self._vllm_bytes(gpu_bytes) if has_engine else 0
        self.sleeps = has_engine and bool(self.service.devices) and config.rollout.vllm.sleep_level != 0
        kept = self._all_models()
        self._offload_keys = _offload_keys(config, role)
        self.offloaded = {key: getattr(kept, term) for key, term in self._offload_keys.items()}
        self._kept = replace(kept, offloaded=0 if self.service.devices else sum(self.offloaded.values()))

    def needing(self, *terms: str) -> Terms:
        """Returns what a rank keeps in a phase that needs these terms: all terms but others that are offloaded."""
        return replace(self._kept, **{term: 0 for term in self._offload_keys.values() if term not in terms})

    def phases(self) -> Iterator[tuple[str, Terms]]:
        """Yields name and memory of each phase of a step in which the group works."""
        trained = self.trained
        model = self.model
        is_policy = self.role == "actor"
        if self.role in self.config.samplers:
            yield "generate", self._sampling()
        if trained:
            name = "log-probs" if is_policy else "values"
            kept = self.needing("weights")
            yield name, self._forward(trained, model, kept, has_logits=is_policy, is_gathered=self.is_wrapped)
        for name, shape in self.frozen.items():
            row = FROZEN_MODELS[name]
            kept = self.needing("weights" if self._is_own(name) else name)
            has_logits = row.kind == "policy"
            computed = getattr(self.config, row.section)
            added = {"has_logits": has_logits, "is_gathered": self.is_divided}
            yield row.phase, self._forward(computed, shape, kept, **added)
        if trained:
            assert trained.ppo_mini_batch_size is not None, "load resolves it"
            mini_batch = micro_batch_of(self.config, self.role, trained, trained.ppo_mini_batch_size)
            gathered = training_gathered(model, compute_bytes(trained)) if self.is_wrapped else 0
            kept = replace(self.needing("weights"), gathered_weights=gathered)
            shards = self.shards if self.is_wrapped else None
            on_gpu = bool(self.service.devices)
            moments = backward(model, mini_batch, trained, shards, is_policy=is_policy, on_gpu=on_gpu)
            yield "backward", max((replace(kept, **terms) for terms in moments), key=lambda terms: terms.total)
            kept = self.needing("weights")
            moments_bytes = kept.optimizer + self._bucket_bytes(trained)
            gradients = 4 * model.num_trained // self.shards
            yield "optimizer step", replace(kept, optimizer=moments_bytes, gradients=gradients)

    def _all_models(self) -> Terms:
        """Returns the models and the process that a rank keeps if nothing is offloaded."""
        terms = {
            name: compute_bytes(getattr(self.config, FROZEN_MODELS[name].section)) * shape.num_parameters // self.shards
            for name, shape in self.frozen.items()
            if not self._is_own(name)
        }
        if self.trained:
            frozen_bytes = compute_bytes(self.trained) * self.model.num_frozen
            terms["weights"] = (frozen_bytes + 4 * self.model.num_trained) // self.shards
            terms["optimizer"] = 2 * _moment_bytes(self.trained) * self.model.num_trained // self.shards
        terms["vllm"] = self._asleep_bytes() if self.sleeps else self.vllm
        return Terms(process=GPU_PROCESS_BYTES if self.service.devices else CPU_PROCESS_BYTES, **terms)

    def _bucket_bytes(self, trained: TrainedModelConfig) -> int:
        """Returns the memory of the moments that an optimizer step has on the device beside those that stay there."""
        offloads = trained.optimizer_offload
        bytes_each = _moment_bytes(trained)
        if bytes_each == 4 and not offloads:
            return 0
        in_flight = 2 if offloads and self.service.devices else 1
        all_weights = bucket_bytes_per_weight(bytes_each) * self.model.num_trained // self.shards
        return min(in_flight * MOMENT_BUCKET_BYTES, all_weights)

    def _is_own(self, frozen: str) -> bool:
        """Returns True for the reference of an actor with adapters, which is the actor without them."""
        return frozen == "reference" and self.role == "actor" and self.config.actor.lora_rank > 0

    def _forward(
        self, computed: ComputedModelConfig, model: ModelShape, kept: Terms, *, has_logits: bool, is_gathered: bool
    ) -> Terms:
        """Returns the memory of a rank in a forward pass without gradients."""
        bytes_each = compute_bytes(computed)
        everything = micro_batch_of(self.config, self.role, computed, self.config.data.train_batch_size)
        gathered = training_gathered(model, bytes_each) if is_gathered else 0
        added = forward_only(model, everything, bytes_each, has_logits=has_logits)
        return replace(kept, gathered_weights=gathered, **added)

    def _sampling(self) -> Terms:
        """Returns the memory of a rank while it samples; vLLM may get the weights before it has a KV cache."""
        weights = compute_bytes(self.config.actor) * self.model.num_parameters
        if not self.trained:
            return self._generation(replace(self._kept, weights=0 if self.vllm else weights, vllm=self.vllm))
        sampling = self._generation(replace(self.needing("weights"), vllm=self.vllm))
        if not (self.vllm and self.sleeps):
            return sampling
        loaded = weights // self.config.rollout.vllm.tensor_model_parallel_size
        loading = replace(sampling, vllm=loaded + self._asleep_bytes())
        sampling = replace(sampling, weights=self.needing().weights)
        return max(sampling, loading, key=lambda terms: terms.total)

    def _generation(self, kept: Terms) -> Terms:
        """Returns the memory of a rank that samples: gathering of weights, prefill or decoding, whichever needs most.

        gathering: first the weights in no layer; a unit is there twice, and its shard in the compute dtype; a rollout
                   group gathers nothing
        prefill:   c U M (2 D + 3 I + 2 E D + 2 H) + (1 + c) min(U M^2, MAX_MASK)    for U different prompts of M tokens
        decoding:  the whole KV cache, and `_sampling_bytes` for each of the rows x V logits
        """
        config = self.config
        model = self.model
        wraps = self.is_wrapped
        data = config.data
        rollout = config.rollout
        num_ranks = self.service.num_processes
        bytes_each = compute_bytes(config.actor)
        if rollout.backend == "vllm":  # it copies one tensor at a time
            return replace(kept, gathered_weights=bytes_each * model.vocabulary * model.hidden if wraps else 0)
        root, layer = ((1 + 1 / self.shards) * unit for unit in (model.root_parameters, model.layer_parameters))
        gathering = bytes_each * max(model.root_parameters + root, model.num_parameters + layer)
        gathering_terms = replace(kept, gathered_weights=int(gathering) if wraps else 0)
        kept = replace(kept, gathered_weights=bytes_each * model.num_parameters if wraps else 0)
        shares = {"rollout": float(rollout.share), "actor": 1.0 - float(rollout.share)}
        share = shares[self.role] if len(config.samplers) > 1 else 1.0
        waiting = ceil(data.draw_size * share / num_ranks) * rollout.n
        if data.val_files:
            waiting = max(waiting, ceil(config.evaluation.batch_size * share / num_ranks) * config.evaluation.n)
        rows = min(rollout.max_batch_size, waiting)
        prompts = rows if data.val_files else ceil(rows / rollout.n)
        tokens = prompts * data.max_prompt_length
        mask = min(tokens * data.max_prompt_length, MAX_MASK)
        attention = bytes_each * tokens * 2 * model.attention + (1 + bytes_each) * mask
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

    def _vllm_bytes(self, gpu_bytes: int | None) -> int:
        """Returns the bytes of vLLM while it generates: a share of the GPU, or its parts with vllm.kv_cache_gb."""
        settings = self.config.rollout.vllm
        on_gpu = bool(self.service.devices)
        if settings.kv_cache_gb is None and on_gpu and gpu_bytes is not None:
            return int(settings.gpu_memory_utilization * gpu_bytes)
        weights = compute_bytes(self.config.actor) * self.model.num_parameters // settings.tensor_model_parallel_size
        default_gb = 0.0 if on_gpu else 1.0
        kept = self._asleep_bytes() if on_gpu else 0
        return weights + int((settings.kv_cache_gb or default_gb) * GIB) + kept

    def _asleep_bytes(self) -> int:
        """Returns the bytes that vLLM keeps on a GPU while it sleeps: work space, CUDA graphs, communicators."""
        settings = self.config.rollout.vllm
        graphs = 0 if settings.enforce_eager else VLLM_GRAPH_BYTES
        communicators = VLLM_COMMUNICATOR_BYTES if settings.tensor_model_parallel_size > 1 else 0
        return VLLM_WORKSPACE_BYTES + graphs + communicators


def num_shards(config: Config, role: RoleName) -> int:
    """Returns the number of ranks of a group that hold one copy of the weights together."""
    num_ranks = config.services.of(role).num_processes
    if role not in config.trained_roles:
        return num_ranks
    trained = config.trained_model_of(role)
    if trained.strategy == "ddp":
        return 1
    return num_ranks if trained.fsdp_size == -1 else trained.fsdp_size


def _moment_bytes(trained: TrainedModelConfig) -> int:
    return 4 if trained.optimizer_state_dtype == "fp32" else 2


def _offload_keys(config: Config, role: RoleName) -> Mapping[str, str]:
    """Returns the keys that are set to offload memory of a group, with the names of the terms of `Terms`."""
    trained = {f"{role}.param_offload": "weights", f"{role}.optimizer_offload": "optimizer"}
    frozen = {model.offload_key: name for name, model in frozen_models_of(config, role).items()}
    keys = (trained if role in config.trained_roles else {}) | frozen
    return {key: term for key, term in keys.items() if attrgetter(key)(config)}


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


def _sampling_bytes(config: Config) -> int:
    """Returns the bytes of memory for each logit while a token is sampled.

    These are the logit in the compute dtype, its exponential in fp32 and its sum in fp64; for bf16, or a temperature
    other than 1, a copy in fp32; and what top-k and top-p sort.
    """
    rollout = config.rollout
    cut = 4 + 8 + 8 + 8 + 4 if rollout.top_p < 1.0 else 4 + 8 if rollout.top_k else 0
    widened = 4 if config.actor.dtype == "bf16" or rollout.temperature != 1.0 else 0
    return compute_bytes(config.actor) + widened + 4 + 8 + cut
