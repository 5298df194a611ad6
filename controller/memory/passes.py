"""Computes the bytes of a forward or backward pass of one model on one rank: gathered weights, activations, logits.

Legend: P weights, of which P_b lie under adapters, P_s are in checkpoints (all others) and P_t are trained, G ranks
that divide a copy of the weights, c bytes of the compute dtype (4 in fp32, 2 in bf16), L layers, D hidden, I width of
the MLP, E experts that compute a token (0 without experts), H query heads x head dimension, K key-value heads x head
dimension, A numbers of a token between both parts of a layer's adapters, V vocabulary, T tokens of a micro-batch, N
response tokens of it, C tokens of a chunk of logits.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil

from controller.memory.images import patch_bytes, pixel_bytes, saved_by_tower, tower_transients
from controller.models.shape import ModelShape
from splitppo.config import ComputedModelConfig, Config, TrainedModelConfig
from splitppo.config.section import RoleName
from splitppo.config.sections.models import Checkpointing
from splitppo.machine.memory_limits import KEEP_GATHERED_BYTES, KV_ROOM, MAX_LOGITS

_LAYERS_IN_FLIGHT = 2  # one layer computes while the next is gathered


@dataclass(frozen=True)
class MicroBatch:
    """The sizes of the largest micro-batch of a rank."""

    tokens: int  # T, padding included; in a sequence group those of this rank
    responses: int  # N, of these
    is_only_one: bool  # its mini-batch has no other
    prompts: int = 0  # tokens of prompts, each of which may be one of an image


def training_gathered(model: ModelShape, bytes_each: int) -> int:
    """Returns the bytes of gathered (unsharded) weights, in the compute dtype, that a rank has while it computes.

    c P_b + 4 P_s <= KEEP_GATHERED_BYTES:  c P      else:  c (what is in no layer + 2 layers)
    """
    if bytes_each * model.num_base + 4 * model.num_saved <= KEEP_GATHERED_BYTES:
        return bytes_each * model.num_parameters
    return bytes_each * (model.root_parameters + _LAYERS_IN_FLIGHT * model.layer_parameters)


def layer_activations(model: ModelShape, tokens: int, bytes_each: int) -> int:
    """Returns the size in bytes of activations that one decoder layer keeps for its backward pass.

        T (8 D + c (4 D + 2 H + 2 K + 4 I + 2 E D))       2 I instead of 4 I if the MLP has no gate
        T (8 D + c (2 D + 2 H + 2 K + 4 I + 2 E D + A))   with adapters

    Both norms keep their input in fp32, the normalised values (unless their weights are frozen) and their output, which
    the projections share. Attention keeps query, key, value and output. A gated MLP keeps both projections, the
    activation and the product. Of experts, each of a token's keeps its input and output, too.
    """
    mlp = (4 if model.is_gated else 2) * model.intermediate
    norms = (4 if model.trains_norms else 2) * model.hidden
    experts = 2 * model.experts_per_token * model.hidden
    narrow = norms + 2 * model.attention + 2 * model.key_values + mlp + experts + model.adapter_outputs
    return tokens * (4 * 2 * model.hidden + bytes_each * narrow)


def saved_activations(model: ModelShape, tokens: int, bytes_each: int, *, checkpointing: Checkpointing) -> int:
    """Returns the size in bytes of activations that all layers and the last norm keep at the end of a forward pass.

    layers:                  L x layer_activations        last norm: T D (4 + c), 4 T D if norms are frozen
    gradient_checkpointing:  L c T D + layer_activations of the layer that is computed again; selective: L c T H more
    """
    layer = layer_activations(model, tokens, bytes_each)
    num_layers = model.num_layers - model.num_layers_below
    width = model.hidden + (model.attention if checkpointing == "selective" else 0)
    layers = num_layers * (bytes_each * tokens * width if checkpointing else layer)
    last_norm = tokens * model.hidden * (4 + bytes_each if model.trains_norms else 4)
    return layers + last_norm + (layer if checkpointing else 0)


def kv_cache_bytes(model: ModelShape, rows: int, positions: int, bytes_each: int) -> int:
    """Returns the size in bytes of a KV cache for `rows` rows of `positions` tokens, with the reserved room.

    rows x 2 K c x sum over layers of (min(positions, window) + KV_ROOM)
    """
    shown = sum(min(positions, window or positions) + KV_ROOM for window in model.windows)
    return rows * 2 * model.key_values * bytes_each * shown


def compute_bytes(computed: ComputedModelConfig) -> int:
    """Returns the bytes of a number in the computation of a model: c."""
    return 2 if computed.dtype == "bf16" else 4


def sequence_ranks(config: Config, role: RoleName) -> int:
    """Returns the number of ranks of a group that divide the positions of the same rows."""
    return config.trained_model_of(role).ulysses_sequence_parallel_size if role in config.trained_roles else 1


def longest_row(config: Config, role: RoleName, computed: ComputedModelConfig) -> int:
    """Returns the tokens of the longest row of a model of a group; those of frozen models have no privileged text."""
    if role == "critic" and computed is config.critic:
        return config.longest_row_of(role)
    return config.longest_context


def micro_batch_of(
    config: Config, role: RoleName, computed: ComputedModelConfig, prompts: int, *, keeps_rows: bool = False
) -> MicroBatch:
    """Returns the largest micro-batch of a rank if all rows have full length; the ranks share `prompts` prompts.

    A response with several contexts is a row for each of them, of at most `longest_context` tokens; those of one
    response have no more tokens than one row of full length. With `keeps_rows` they share a micro-batch. With S ranks
    that divide positions, rows and budget are those of S ranks, and T is 1 / S of their tokens. What the value model
    alone reads comes before each context.
    """
    service = config.services.of(role)
    context = config.data.longest_row if keeps_rows else config.longest_context
    longest = context + longest_row(config, role, computed) - config.longest_context
    together = sequence_ranks(config, role)
    responses = ceil(prompts * config.rollout.n * together / service.num_processes)
    rows = ceil(responses * config.data.longest_row / context)
    budget = computed.ppo_max_token_len_per_gpu * together
    fixed = computed.ppo_micro_batch_size_per_gpu
    packed = computed.use_remove_padding is not False
    if fixed is not None:
        tokens = min(fixed, rows) * longest
    elif packed:
        tokens = min(max(budget, longest), rows * longest)
    else:
        tokens = min(max(1, budget // longest), rows) * longest
    own = ceil(tokens / together)
    most = min(config.data.max_response_length, longest)
    response_tokens = max(ceil(own * most / longest), min(own, most))  # a part of one row may have responses alone
    prompt_tokens = ceil(own * min(config.data.max_prompt_length, longest) / longest)
    return MicroBatch(own, response_tokens, is_only_one=tokens >= rows * longest, prompts=prompt_tokens)


def forward_only(model: ModelShape, batch: MicroBatch, bytes_each: int, *, has_logits: bool) -> dict[str, int]:
    """Returns the bytes of a forward pass without gradients: the MLP of a layer or a chunk of logits, if larger.

    c T (2 D + 3 I + 2 E D)       or       c N D + 12 C V       or, before them, those of a vision tower (`images`)
    """
    beside, of_tower = _images(model, batch, bytes_each)
    layer = layer_transients(model, batch.tokens, bytes_each) + beside
    hidden = bytes_each * batch.responses * model.hidden + beside
    logits = 12 * _chunk(model, batch) * model.vocabulary if has_logits else 0
    if of_tower > max(layer, hidden + logits):
        return {"activations": of_tower}
    return {"activations": layer} if layer > hidden + logits else {"activations": hidden, "logits": logits}


def _images(model: ModelShape, batch: MicroBatch, bytes_each: int) -> tuple[int, int]:
    """Returns the bytes that images have beside the language model, and those at the peak of the tower; 0 without."""
    if model.tower is None:
        return 0, 0
    patches = model.tower.merged * batch.prompts
    at_peak = pixel_bytes(model.tower, patches) + tower_transients(model.tower, patches, bytes_each)
    return patch_bytes(model.tower, patches, model.hidden, bytes_each), at_peak


def backward(
    model: ModelShape,
    batch: MicroBatch,
    trained: TrainedModelConfig,
    sharded_over: int | None,
    *,
    is_policy: bool,
    on_gpu: bool,
) -> Iterator[dict[str, int]]:
    """Yields the bytes of gradients, activations and logits at each moment of a backward pass that may be its peak.

    At the output layer: logits, their exponentials and their gradient, C V each in fp32 (with bf16 also the gradient in
    bf16), and the gradient of the layer's weights, V D, twice: the sum in fp32, and what is added to it (in bf16: what
    it is rounded to). In the last decoder layer: gradients inside its MLP. At the end: the gradient of the embedding,
    and of the output layer if it is tied. Of a layer that is frozen, as both are with adapters, the term with V D is 0.
    `sharded_over` is G; None if the model is not wrapped.

        output layer:   saved_activations + c N D + 12 C V (bf16: 14 C V) + (4 + c) V D
        decoder layer:  saved_activations + c N D + c T (2 D + 3 I + 2 E D) + 4 V D if tied
        embedding:      4 V D, 8 V D if tied

    These are beside the gradients kept of earlier micro-batches, in fp32. With a single micro-batch the kept ones are 0
    until the end, because its gradients grow while its activations are freed; at the end they are all there, those of
    the embedding among them. Ranks that divide positions keep at least one key-value head each; in fp32 on a GPU
    attention keeps a key-value head for each of the query. Images and what their tower saves are there at each moment,
    and at one more the tower computes (`images`).
    """
    repeated = trained.ulysses_sequence_parallel_size * model.head_dim
    if on_gpu and trained.dtype == "fp32":
        repeated = model.attention
    model = replace(model, key_values=max(model.key_values, repeated))
    bytes_each = compute_bytes(trained)
    gradients = _kept_gradients(model, sharded_over)
    kept = 0 if batch.is_only_one else gradients
    beside, in_tower = _images(model, batch, bytes_each)
    of_tower = 0
    if model.tower is not None:
        patches = model.tower.merged * batch.prompts
        of_tower = saved_by_tower(model.tower, patches, bytes_each, checkpointing=trained.gradient_checkpointing)
        yield {"gradients": kept, "activations": of_tower + in_tower}
    beside += of_tower
    saved = saved_activations(model, batch.tokens, bytes_each, checkpointing=trained.gradient_checkpointing) + beside
    whole_embedding = 4 * model.vocabulary * model.hidden  # the terms with 4 V D
    embedding = whole_embedding if model.trains_embedding else 0
    output_layer = whole_embedding if model.trains_output_layer else 0
    tied = embedding if model.is_tied else 0
    if is_policy:
        saved += bytes_each * batch.responses * model.hidden
        chunk = _chunk(model, batch) * model.vocabulary * (12 if bytes_each == 4 else 14)
        weight = output_layer + output_layer * bytes_each // 4
        yield {"gradients": kept, "activations": saved, "logits": chunk + weight}
    inside = layer_transients(model, batch.tokens, bytes_each)
    yield {"gradients": kept, "activations": saved + inside, "logits": tied}
    yield {"gradients": gradients if batch.is_only_one else gradients + embedding + tied, "activations": beside}


def _kept_gradients(model: ModelShape, sharded_over: int | None) -> int:
    """Returns the bytes of fp32 gradients kept between micro-batches: all if weights stay gathered, else a shard."""
    whole = 4 * model.num_trained
    if sharded_over is None or whole <= KEEP_GATHERED_BYTES:
        return whole
    return whole // sharded_over


def layer_transients(model: ModelShape, tokens: int, bytes_each: int) -> int:
    """Returns the bytes of what the MLP of a layer computes, and keeps for no other layer: c T (2 D + 3 I + 2 E D)."""
    hidden = 2 * (1 + model.experts_per_token) * model.hidden
    return bytes_each * tokens * (hidden + (3 if model.is_gated else 2) * model.intermediate)


def _chunk(model: ModelShape, batch: MicroBatch) -> int:
    return min(batch.responses, max(1, MAX_LOGITS // model.vocabulary))
