"""The memory of a rank while its group updates its model, and while it saves it, in bytes.

`passes` has the legend of the formulas.
"""

from dataclasses import replace

from controller.memory.group import Group
from controller.memory.images import kept_images
from controller.memory.kept import CPU_PROCESS_BYTES, Kept, moment_bytes
from controller.memory.passes import backward, compute_bytes, micro_batch_of, training_gathered
from controller.memory.terms import Terms, largest_total
from controller.models.shape import ModelShape
from splitppo.config import TrainedModelConfig
from splitppo.machine.memory_limits import MAX_FILE_BYTES, MOMENT_BUCKET_BYTES, bucket_bytes_per_weight


def backward_pass(group: Group, kept: Kept, trained: TrainedModelConfig) -> Terms:
    """Returns the memory of a rank in the forward and backward pass of a micro-batch, at its peak (`backward`)."""
    assert trained.ppo_mini_batch_size is not None, "load resolves it"
    keeps_rows = group.role == "actor" and group.config.actor.policy_loss.looks_at_rows
    micro_batch = micro_batch_of(group.config, group.role, trained, trained.ppo_mini_batch_size, keeps_rows=keeps_rows)
    gathered = training_gathered(group.model, compute_bytes(trained)) if group.gathers_trained else 0
    moments = backward(
        group.model,
        micro_batch,
        trained,
        group.num_shards if group.gathers_trained else None,
        is_policy=group.role == "actor",
        on_gpu=bool(group.devices),
    )
    computing = replace(kept.needing("weights"), gathered_weights=gathered)
    return largest_total(*(replace(computing, **terms) for terms in moments))


def optimizer_step(group: Group, kept: Kept, trained: TrainedModelConfig) -> Terms:
    """Returns the memory of a rank in a step of AdamW: all gradients in fp32, 4 P_t / G, and `_bucket_bytes`."""
    computing = kept.needing("weights")
    gradients = 4 * group.model.num_trained // group.num_shards
    return replace(computing, optimizer=computing.optimizer + _bucket_bytes(group, trained), gradients=gradients)


def _bucket_bytes(group: Group, trained: TrainedModelConfig) -> int:
    """Returns the bytes of the moments that an optimizer step has on the device beside those that stay there.

    Moments that are offloaded or in bf16 have a bucket of them there, from main memory on a GPU two.
    """
    bytes_each = moment_bytes(trained)
    if bytes_each == 4 and not trained.optimizer_offload:
        return 0
    in_flight = 2 if trained.optimizer_offload and group.devices else 1
    all_weights = bucket_bytes_per_weight(bytes_each) * group.model.num_trained // group.num_shards
    return min(in_flight * MOMENT_BUCKET_BYTES, all_weights)


def saving(group: Group, kept: Kept, peak: Terms) -> Terms:
    """Returns the main memory of a rank while a checkpoint is written, which may be during any phase.

    `peak` is the memory of the phase that needs most; on a GPU only what is offloaded, and images are in main memory.
    """
    offloaded = sum(kept.offloaded.values())
    in_main_memory = Terms(offloaded=offloaded, images=kept_images(group), process=CPU_PROCESS_BYTES)
    with_hf_model = group.config.checkpoint.save_hf_model
    buffer = _checkpoint_bytes(group.model, group.num_shards, with_hf_model=with_hf_model)
    return replace(in_main_memory if group.devices else peak, checkpoint=buffer)


def _checkpoint_bytes(model: ModelShape, shards: int, *, with_hf_model: bool) -> int:
    """Returns the bytes of main memory that rank 0 needs to write a checkpoint during training; others need no more.

    a tensor at a time:  4 T / G, T the weights of the embedding or of a layer, whichever is more; with adapters P_s / L
    huggingface/:        min(4 P_s, max(MAX_FILE_BYTES, 4 T)), and where G > 1 the tensor whose shards are joined, 4 T
    """
    largest = 4 * max(model.vocabulary * model.hidden, model.layer_parameters)
    if model.num_base:
        largest = 4 * model.num_saved // model.num_layers
    if not with_hf_model:
        return largest // shards
    joined = largest if shards > 1 else 0
    return min(4 * model.num_saved, max(MAX_FILE_BYTES, largest)) + joined
