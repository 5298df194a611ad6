"""The memory of a rank while its group samples, with vLLM or with the policy itself, in bytes.

`passes` has the legend of the formulas.
"""

from collections.abc import Iterator
from dataclasses import replace
from math import ceil

from controller.memory import vllm
from controller.memory.group import Group
from controller.memory.images import patch_bytes, pixel_bytes, tower_transients
from controller.memory.kept import Kept
from controller.memory.passes import compute_bytes, kv_cache_bytes, layer_transients
from controller.memory.terms import Terms, largest_total
from splitppo.config import Config
from splitppo.machine.memory_limits import MAX_MASK


def sampling(group: Group, kept: Kept) -> Terms:
    """Returns the memory of a rank while it samples."""
    if vllm.has_vllm(group):
        return _with_vllm(group, kept)
    if group.trained:
        return _with_the_policy(group, kept.needing("weights"))
    whole = compute_bytes(group.config.actor) * group.model.num_parameters
    return _with_the_policy(group, replace(kept.everything, weights=whole))


def _with_vllm(group: Group, kept: Kept) -> Terms:
    """Returns the memory of a rank that samples with vLLM, or loads the weights into it, whichever needs more.

    loading:    trained weights, c V D of one gathered tensor (they are copied one by one), and the engine with its
                weights, but without a KV cache, if it sleeps between samplings
    sampling:   the same with the whole engine; trained weights that are offloaded are in main memory again, if the
                engine sleeps between samplings
    """
    awake = vllm.awake_bytes(group)
    if not group.trained:
        return replace(kept.everything, weights=0, vllm=awake)
    one_tensor = compute_bytes(group.config.actor) * group.model.vocabulary * group.model.hidden
    gathered = one_tensor if group.gathers_trained else 0
    beside_weights = replace(kept.needing("weights"), vllm=awake, gathered_weights=gathered)
    if not vllm.sleeps(group):
        return beside_weights
    loading = replace(beside_weights, vllm=vllm.weights_bytes(group) + vllm.asleep_bytes(group.config))
    return largest_total(replace(beside_weights, weights=kept.needing().weights), loading)


def _with_the_policy(group: Group, kept: Terms) -> Terms:
    """Returns the memory of a rank that samples with the policy itself, at the moment that needs most.

    gathering: first the weights in no layer; a unit is there twice, and its shard in the compute dtype; a rollout group
               gathers nothing, nor does a rank whose weights are whole
    prefill:   c U M (2 D + 3 I + 2 E D + 2 H) + (1 + c) min(U M^2, MAX_MASK)    for U different prompts of M tokens
    decoding:  the whole KV cache, and `_sampling_bytes` for each of the rows x V logits
    """
    gathering = replace(kept, gathered_weights=_gathering_bytes(group) if group.gathers_trained else 0)
    whole = compute_bytes(group.config.actor) * group.model.num_parameters
    gathered = replace(kept, gathered_weights=whole if group.gathers_trained else 0)
    return largest_total(gathering, *_prefill(group, gathered), _decoding(group, gathered))


def _gathering_bytes(group: Group) -> int:
    """Returns the bytes of gathered weights at the moment of gathering that needs most.

    c max(R + (1 + 1 / G) R, P + (1 + 1 / G) U)      P all weights, R those in no layer (the root), U those of a layer

    gathering the root:         its whole weights R, the buffer of the all-gather R, this rank's input R / G
    gathering the last layer:   all whole weights P, the buffer of the all-gather U, this rank's input U / G
    """
    model = group.model
    root = (1 + 1 / group.num_shards) * model.root_parameters
    layer = (1 + 1 / group.num_shards) * model.layer_parameters
    return int(compute_bytes(group.config.actor) * max(model.root_parameters + root, model.num_parameters + layer))


def _prefill(group: Group, gathered: Terms) -> Iterator[Terms]:
    """Yields the memory of a rank while the policy reads its prompts, each once, all in one forward pass.

    c U M (2 D + 3 I + 2 E D + 2 H) + (1 + c) min(U M^2, MAX_MASK)    for U different prompts of M tokens

    These are the transients of a layer, query and output of attention, and the mask, as bool and in the compute dtype.
    The KV cache is beside them, and images (`images`), whose tower has computed before: that is another moment.
    """
    data = group.config.data
    bytes_each = compute_bytes(group.config.actor)
    prompts = _num_prompts(group)
    tokens = prompts * data.max_prompt_length
    mask = min(tokens * data.max_prompt_length, MAX_MASK)
    attention = bytes_each * tokens * 2 * group.model.attention + (1 + bytes_each) * mask
    of_images = 0
    if group.model.tower is not None:
        tower = group.model.tower
        patches = tower.merged * tokens
        of_images = patch_bytes(tower, patches, group.model.hidden, bytes_each)
        in_tower = pixel_bytes(tower, patches) + tower_transients(tower, patches, bytes_each)
        yield replace(gathered, activations=in_tower)
    yield replace(
        gathered,
        kv_cache=kv_cache_bytes(group.model, prompts, data.max_prompt_length, bytes_each),
        activations=layer_transients(group.model, tokens, bytes_each) + attention + of_images,
    )


def _decoding(group: Group, gathered: Terms) -> Terms:
    """Returns the memory of a rank while it samples token by token: KV cache of contexts of full length, and logits.

    There are rows x V logits, with `_sampling_bytes` bytes for each.
    """
    rows = _num_rows(group)
    bytes_each = compute_bytes(group.config.actor)
    return replace(
        gathered,
        kv_cache=kv_cache_bytes(group.model, rows, group.config.longest_context, bytes_each),
        logits=rows * group.model.vocabulary * _sampling_bytes(group.config),
    )


def _num_rows(group: Group) -> int:
    """Returns the responses that a rank samples at the same time: those of a step or of validation, up to a limit."""
    config = group.config
    share = 1.0
    if len(config.sampling_roles) > 1:
        by_rollout_group = float(config.rollout.share)
        share = by_rollout_group if group.role == "rollout" else 1.0 - by_rollout_group
    waiting = ceil(config.data.draw_size * share / group.num_ranks) * config.rollout.n
    if config.data.val_files:
        validated = ceil(config.evaluation.batch_size * share / group.num_ranks) * config.evaluation.n
        waiting = max(waiting, validated)
    return min(config.rollout.max_batch_size, waiting)


def _num_prompts(group: Group) -> int:
    """Returns the different prompts of these responses; those of validation may all be different."""
    rows = _num_rows(group)
    return rows if group.config.data.val_files else ceil(rows / group.config.rollout.n)


def _sampling_bytes(config: Config) -> int:
    """Returns the bytes of memory for each logit while a token is sampled.

    These are the logit in the compute dtype, its exponential in fp32 and its sum in fp64; for bf16, or a temperature
    other than 1, a copy in fp32; and what top-k and top-p sort.
    """
    rollout = config.rollout
    cut = 4 + 8 + 8 + 8 + 4 if rollout.top_p < 1.0 else 4 + 8 if rollout.top_k else 0
    widened = 4 if config.actor.dtype == "bf16" or rollout.temperature != 1.0 else 0
    return compute_bytes(config.actor) + widened + 4 + 8 + cut
