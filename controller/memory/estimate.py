"""Estimates the memory of one rank in each phase of a step: what the engine always keeps, and what the phase adds.

Legend: P weights, R ranks, c bytes of the compute dtype (4 in fp32, 2 in bf16), L layers, D hidden, I width of the MLP,
H query heads x head dimension, K key-value heads x head dimension, V vocabulary, T tokens of a micro-batch, N response
tokens of it, C tokens of a chunk of logits.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import ceil

from controller.memory.model_shape import ModelShape
from splitppo.config import ComputedModelConfig, Config, TrainedModelConfig
from splitppo.config.section import RoleName, TrainedRoleName
from splitppo.machine.memory_limits import KEEP_GATHERED_BYTES, KV_ROOM, MAX_FILE_BYTES, MAX_LOGITS

GIB = 1 << 30
# The memory of a rank without a model. On a CPU: Python, torch and transformers in anonymous memory, as measured by
# benchmarks.memory. On a GPU: the CUDA context, work space of libraries and buffers of NCCL; not measured.
CPU_PROCESS_BYTES, GPU_PROCESS_BYTES = 300 << 20, GIB
AT_REST = "at rest"  # the phase in which another group computes on the same GPUs
_LAYERS_IN_FLIGHT = 2  # one layer computes while the next is gathered
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

    @property
    def peak_phase(self) -> str:
        """The name of the phase in which a rank needs most memory."""
        return max(self.phases, key=lambda name: self.phases[name].total)

    @property
    def peak(self) -> Terms:
        """The memory of a rank in the phase that needs most, divided into parts."""
        return self.phases[self.peak_phase]


@dataclass(frozen=True)
class _MicroBatch:
    tokens: int  # T, padding included
    responses: int  # N
    is_only_one: bool  # its mini-batch has no other


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

    In every phase there are the weights and the moments of AdamW, sharded, in fp32, and frozen models in the compute
    dtype:

        weights 4 P / R,   optimizer 8 P / R,   reference c P_ref / R,   reward_model c P_rm / R

    Phases are "generate" (the actor, if its group samples), "log-probs" (the critic: "values"), "reference", "reward",
    "backward" (a micro-batch of an update, with its forward pass), "optimizer step" and "at rest" (the critic, if a
    rollout group samples on its GPUs). A checkpoint may be written
    during any of them: `saving` is the peak with the buffer of the checkpoint. All rows, also of the reward model, have
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
    num_ranks, bytes_each = service.num_processes, _compute_bytes(trained)
    reference_each = _compute_bytes(config.actor)  # the reference is the actor's first model
    reward_each = _compute_bytes(config.reward_model)
    kept = Terms(
        weights=4 * model.num_parameters // num_ranks,
        optimizer=8 * model.num_parameters // num_ranks,
        reference=reference_each * reference.num_parameters // num_ranks if reference else 0,
        reward_model=reward_each * reward_model.num_parameters // num_ranks if reward_model else 0,
        process=GPU_PROCESS_BYTES if service.devices else CPU_PROCESS_BYTES,
    )
    phases = {}
    if role in config.samplers:
        vllm = _vllm_bytes(config, role, model, gpu_bytes) if config.rollout.backend == "vllm" else 0
        sleeps = bool(service.devices) and config.rollout.vllm.sleep_level > 0
        phases["generate"] = _generation(config, role, model, replace(kept, vllm=vllm))
        kept = replace(kept, vllm=0 if sleeps else vllm)
    wraps = num_ranks > 1 or trained.dtype == "bf16"
    gathered = training_gathered(model, bytes_each) if wraps else 0
    forward = _forward_phase(config, role, trained, model, kept, has_logits=role == "actor")
    phases["log-probs" if role == "actor" else "values"] = replace(forward, gathered_weights=gathered)
    if reference:
        phases["reference"] = _forward_phase(config, role, config.actor, reference, kept, has_logits=True)
    if reward_model:
        phases["reward"] = _forward_phase(config, role, config.reward_model, reward_model, kept, has_logits=False)
    assert trained.ppo_mini_batch_size is not None, "load resolves it"
    mini_batch = _micro_batch(config, role, trained, trained.ppo_mini_batch_size)
    phases["backward"] = max(
        (
            replace(kept, gathered_weights=gathered, **terms)
            for terms in _backward(model, mini_batch, trained, num_ranks if wraps else None, is_policy=role == "actor")
        ),
        key=lambda terms: terms.total,
    )
    phases["optimizer step"] = replace(kept, gradients=4 * model.num_parameters // num_ranks)
    if role in config.roles_in_turns and config.gpus_in_turns:
        phases[AT_REST] = kept
    memory = GroupMemory(role, num_ranks, service.devices, phases)
    training = Terms(process=CPU_PROCESS_BYTES) if service.devices else memory.peak
    saving = replace(
        training, checkpoint=_checkpoint_bytes(model, num_ranks, with_hf_model=config.checkpoint.save_hf_model)
    )
    return replace(memory, saving=saving)


def _checkpoint_bytes(model: ModelShape, num_ranks: int, *, with_hf_model: bool) -> int:
    """Returns the bytes of main memory that rank 0 needs to write a checkpoint during training; others need no more.

    a tensor at a time:  4 T / R, T the weights of the embedding or of a layer, whichever is more
    huggingface/:        min(4 P, max(MAX_FILE_BYTES, 4 T)), and where R > 1 the tensor whose shards are joined, 4 T
    """
    largest = 4 * max(model.vocabulary * model.hidden, model.layer_parameters)
    if not with_hf_model:
        return largest // num_ranks
    joined = largest if num_ranks > 1 else 0
    return min(4 * model.num_parameters, max(MAX_FILE_BYTES, largest)) + joined


def estimate_reward_group(config: Config, model: ModelShape) -> GroupMemory:
    """Estimates the memory of each rank of a worker group that has only the reward model."""
    service, bytes_each = config.services.reward, _compute_bytes(config.reward_model)
    kept = Terms(
        reward_model=bytes_each * model.num_parameters // service.num_processes,
        process=GPU_PROCESS_BYTES if service.devices else CPU_PROCESS_BYTES,
    )
    phase = _forward_phase(config, "reward", config.reward_model, model, kept, has_logits=False)
    return GroupMemory("reward", service.num_processes, service.devices, {"reward": phase})


def estimate_rollout_group(config: Config, model: ModelShape, gpu_bytes: int | None = None) -> GroupMemory:
    """Estimates the memory of each rank of a worker group that only samples, with weights that the actor publishes.

    Every rank has whole weights, c P, with rollout.backend hf; with vllm, its share of an engine. Published files are
    mapped, and count as no memory. On GPUs of the critic, the phase "at rest" has neither: the engine sleeps.
    `gpu_bytes` is that of `estimate_group`.
    """
    service, is_vllm = config.services.of("rollout"), config.rollout.backend == "vllm"
    kept = Terms(
        weights=0 if is_vllm else _compute_bytes(config.actor) * model.num_parameters,
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
    bytes_each = _compute_bytes(computed)
    everything = _micro_batch(config, role, computed, config.data.train_batch_size)
    is_gathered = config.services.of(role).num_processes > 1
    return replace(
        kept,
        gathered_weights=training_gathered(model, bytes_each) if is_gathered else 0,
        **_forward_only(model, everything, bytes_each, has_logits=has_logits),
    )


def training_gathered(model: ModelShape, bytes_each: int) -> int:
    """Returns the bytes of gathered (unsharded) weights, in the compute dtype, that a rank has while it computes.

    4 P <= KEEP_GATHERED_BYTES:  c P      else:  c (what is in no layer + 2 layers)
    """
    if 4 * model.num_parameters <= KEEP_GATHERED_BYTES:
        return bytes_each * model.num_parameters
    return bytes_each * (model.root_parameters + _LAYERS_IN_FLIGHT * model.layer_parameters)


def layer_activations(model: ModelShape, tokens: int, bytes_each: int) -> int:
    """Returns the size in bytes of activations that one decoder layer keeps for its backward pass.

        T (8 D + c (4 D + 2 H + 2 K + 4 I))       2 I instead of 4 I if the MLP has no gate

    Both norms keep their input in fp32, the normalised values and their output, which the projections share. Attention
    keeps query, key, value and output. A gated MLP keeps both projections, the activation and the product.
    """
    mlp = (4 if model.is_gated else 2) * model.intermediate
    wide, narrow = 2 * model.hidden, 4 * model.hidden + 2 * model.attention + 2 * model.key_values + mlp
    return tokens * (4 * wide + bytes_each * narrow)


def saved_activations(model: ModelShape, tokens: int, bytes_each: int, *, checkpointing: bool) -> int:
    """Returns the size in bytes of activations that all layers and the last norm keep at the end of a forward pass.

    layers:                  L x layer_activations        last norm: T D (4 + c)
    gradient_checkpointing:  L c T D + layer_activations of the layer that is computed again
    """
    layer = layer_activations(model, tokens, bytes_each)
    layers = model.num_layers * (bytes_each * tokens * model.hidden if checkpointing else layer)
    return layers + tokens * model.hidden * (4 + bytes_each) + (layer if checkpointing else 0)


def kv_cache_bytes(model: ModelShape, rows: int, positions: int, bytes_each: int) -> int:
    """Returns the size in bytes of a KV cache for `rows` rows of `positions` tokens, with the reserved room.

    rows x 2 K c x sum over layers of (min(positions, window) + KV_ROOM)
    """
    shown = sum(min(positions, window or positions) + KV_ROOM for window in model.windows)
    return rows * 2 * model.key_values * bytes_each * shown


def _compute_bytes(computed: ComputedModelConfig) -> int:
    return 2 if computed.dtype == "bf16" else 4


def _micro_batch(config: Config, role: RoleName, computed: ComputedModelConfig, prompts: int) -> _MicroBatch:
    """Returns the largest micro-batch of a rank if all rows have full length; the ranks share `prompts` prompts."""
    service, longest = config.services.of(role), config.data.longest_row
    rows = ceil(prompts * config.rollout.n / service.num_processes)
    budget, fixed = computed.ppo_max_token_len_per_gpu, computed.ppo_micro_batch_size_per_gpu
    packed = computed.use_remove_padding is not False
    if fixed is not None:
        tokens = min(fixed, rows) * longest
    elif packed:
        tokens = min(max(budget, longest), rows * longest)
    else:
        tokens = min(max(1, budget // longest), rows) * longest
    responses = ceil(tokens * config.data.max_response_length / longest)
    return _MicroBatch(tokens, responses, is_only_one=tokens >= rows * longest)


def _forward_only(model: ModelShape, batch: _MicroBatch, bytes_each: int, *, has_logits: bool) -> dict[str, int]:
    """Returns the bytes of a forward pass without gradients: the MLP of a layer or a chunk of logits, if larger.

    c T (2 D + 3 I)       or       c N D + 12 C V
    """
    layer = _layer_transients(model, batch.tokens, bytes_each)
    hidden = bytes_each * batch.responses * model.hidden
    logits = 12 * _chunk(model, batch) * model.vocabulary if has_logits else 0
    return {"activations": layer} if layer > hidden + logits else {"activations": hidden, "logits": logits}


def _backward(
    model: ModelShape, batch: _MicroBatch, trained: TrainedModelConfig, sharded_over: int | None, *, is_policy: bool
) -> Iterator[dict[str, int]]:
    """Yields the bytes of gradients, activations and logits at each moment of a backward pass that may be its peak.

    At the output layer: logits, their exponentials and their gradient, C V each in fp32 (with bf16 also the gradient in
    bf16), and the gradient of the layer's weights, V D, twice: the sum in fp32, and the gradient that is added. In the
    last decoder layer: gradients inside its MLP. At the end: the gradient of the embedding, and of the output layer if
    it is tied. `sharded_over` is the number of ranks; None if the model is not wrapped.

        output layer:   saved_activations + c N D + 12 C V (bf16: 14 C V) + (4 + c) V D
        decoder layer:  saved_activations + c N D + c T (2 D + 3 I) + 4 V D if tied
        embedding:      4 V D, 8 V D if tied

    Gradients of earlier micro-batches are kept in fp32. If a mini-batch has only one micro-batch, its gradients grow
    while its activations are freed.
    """
    bytes_each = _compute_bytes(trained)
    kept = 0 if batch.is_only_one else _kept_gradients(model, sharded_over)
    saved = saved_activations(model, batch.tokens, bytes_each, checkpointing=trained.gradient_checkpointing)
    embedding = 4 * model.vocabulary * model.hidden
    tied = embedding if model.is_tied else 0
    if is_policy:
        saved += bytes_each * batch.responses * model.hidden
        chunk = _chunk(model, batch) * model.vocabulary * (12 if bytes_each == 4 else 14)
        weight = (4 + bytes_each) * model.vocabulary * model.hidden
        yield {"gradients": kept, "activations": saved, "logits": chunk + weight}
    inside = _layer_transients(model, batch.tokens, bytes_each)
    yield {"gradients": kept, "activations": saved + inside, "logits": tied}
    all_gradients = max(kept, _kept_gradients(model, sharded_over))
    yield {"gradients": all_gradients + (0 if batch.is_only_one else embedding + tied)}


def _kept_gradients(model: ModelShape, sharded_over: int | None) -> int:
    """Returns the bytes of fp32 gradients kept between micro-batches: all if weights stay gathered, else a shard."""
    whole = 4 * model.num_parameters
    if sharded_over is None or whole <= KEEP_GATHERED_BYTES:
        return whole
    return whole // sharded_over


def _layer_transients(model: ModelShape, tokens: int, bytes_each: int) -> int:
    return bytes_each * tokens * (2 * model.hidden + (3 if model.is_gated else 2) * model.intermediate)


def _chunk(model: ModelShape, batch: _MicroBatch) -> int:
    return min(batch.responses, max(1, MAX_LOGITS // model.vocabulary))


def _generation(config: Config, role: RoleName, model: ModelShape, kept: Terms) -> Terms:
    """Returns the memory of a rank while it samples: gathering of weights, prefill or decoding, whichever needs most.

    gathering: first the weights in no layer; a unit is there twice, and its shard in the compute dtype; a rollout group
               gathers nothing
    prefill:   c U M (2 D + 3 I + 2 H) + (1 + c) U M^2         for U different prompts of M tokens
    decoding:  the whole KV cache, and `_sampling_bytes` for each of the rows x V logits
    """
    data, rollout, num_ranks = config.data, config.rollout, config.services.of(role).num_processes
    bytes_each = _compute_bytes(config.actor)
    wraps = role == "actor" and (num_ranks > 1 or config.actor.dtype == "bf16")
    if rollout.backend == "vllm":  # it copies one tensor at a time
        return replace(kept, gathered_weights=bytes_each * model.vocabulary * model.hidden if wraps else 0)
    root, layer = ((1 + 1 / num_ranks) * unit for unit in (model.root_parameters, model.layer_parameters))
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
        activations=_layer_transients(model, tokens, bytes_each) + attention,
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
    return _compute_bytes(config.actor) + widened + 4 + 8 + cut


def _vllm_bytes(config: Config, role: RoleName, model: ModelShape, gpu_bytes: int | None) -> int:
    """Returns the bytes of vLLM's weights and KV cache: a share of the GPU, or weights and rollout.vllm.kv_cache_gb."""
    settings, on_gpu = config.rollout.vllm, bool(config.services.of(role).devices)
    if settings.kv_cache_gb is None and on_gpu and gpu_bytes is not None:
        return int(settings.gpu_memory_utilization * gpu_bytes)
    weights = _compute_bytes(config.actor) * model.num_parameters // settings.tensor_model_parallel_size
    default_gb = 0.0 if on_gpu else 1.0
    return weights + int((settings.kv_cache_gb or default_gb) * GIB)
