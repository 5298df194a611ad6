"""Estimates the memory of one rank in each phase of a step: what it always keeps, and what the phase adds.

Each phase has a function: `sampling`, `log_probs_or_values`, `frozen_model`, `backward_pass` and `optimizer_step`.
`passes` has the legend of the formulas.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from controller.memory.frozen_models import FROZEN_MODELS
from controller.memory.group import Group
from controller.memory.kept import Kept, kept_by
from controller.memory.passes import compute_bytes, forward_only, micro_batch_of, training_gathered
from controller.memory.sampling import sampling
from controller.memory.terms import Terms
from controller.memory.updating import backward_pass, optimizer_step, saving
from controller.models.shape import ModelShape
from splitppo.config import ComputedModelConfig, Config, TrainedModelConfig
from splitppo.config.section import RoleName

AT_REST = "at rest"  # the phase in which another group computes on the same GPUs


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
    role: RoleName,
    model: ModelShape,
    *,
    gpu_bytes: int | None = None,
    image_bytes: int | None = None,
    **frozen: ModelShape,
) -> GroupMemory:
    """Estimates the memory of each rank of a worker group.

    In every phase there is what `kept_by` says: trained weights in fp32 and the moments of AdamW, sharded, and frozen
    weights in the compute dtype. A term that is offloaded is 0 in phases that do not need it, and its copy stays in
    main memory.

    Every rank of a rollout group has whole weights, c P, with rollout.backend hf; with vllm, its share of an engine.
    Published files are mapped, and count as no memory. On GPUs of the critic, the phase "at rest" has neither: the
    engine sleeps.

    Phases are "generate" (if the group samples), "log-probs" (the critic: "values"), those of frozen models, "backward"
    (a micro-batch of an update, with its forward pass), "optimizer step" and "at rest" (between commands, if something
    is offloaded, or if a rollout group samples on the critic's GPUs). A checkpoint may be written during any of them:
    `saving` is the peak with the buffer of the checkpoint. All rows, also of the reward model, have the maximum length
    that data.max_prompt_length and max_response_length allow, or contexts rollout.multi_turn.max_context_length. If a
    model reads images, every token of a prompt is one of an image, and no two prompts of a micro-batch share one.
    Attention is taken to keep no scores in memory.

    Args:
        config: the configuration of the run.
        role: the role of the group.
        model: the shape of the role's main model.
        gpu_bytes: the memory of the group's smallest GPU, of which vLLM takes a share; None if not known.
        image_bytes: the size of the files of a prompt's images, on average; 0 if prompts have none, and None if it is
            not known.
        frozen: the shapes of the frozen models that the group holds, by their names in `FROZEN_MODELS`.
    """
    group = Group(config, role, model, frozen, gpu_bytes, image_bytes)
    trained = group.trained
    if trained:
        group = replace(group, model=model.as_trained(trained))
    if image_bytes == 0:
        group = group.without_images()
    kept = kept_by(group)
    phases: dict[str, Terms] = {}
    if role in config.sampling_roles:
        phases["generate"] = sampling(group, kept)
    if trained:
        phases["log-probs" if role == "actor" else "values"] = log_probs_or_values(group, kept, trained)
    for name in frozen:
        phases[FROZEN_MODELS[name].phase] = frozen_model(group, kept, name)
    if trained:
        phases["backward"] = backward_pass(group, kept, trained)
        phases["optimizer step"] = optimizer_step(group, kept, trained)
    if kept.offloaded or (role in config.roles_in_turns and config.gpus_in_turns):
        phases[AT_REST] = kept.needing()
    memory = GroupMemory(role, group.num_ranks, group.devices, phases, offloaded=kept.offloaded)
    return replace(memory, saving=saving(group, kept, memory.peak)) if trained else memory


def log_probs_or_values(group: Group, kept: Kept, trained: TrainedModelConfig) -> Terms:
    """Returns the memory of a rank while the actor computes log-probs, or the critic values."""
    gathered = training_gathered(group.model, compute_bytes(trained)) if group.gathers_trained else 0
    computing = replace(kept.needing("weights"), gathered_weights=gathered)
    return _forward_pass(group, computing, trained, group.model, has_logits=group.role == "actor")


def frozen_model(group: Group, kept: Kept, name: str) -> Terms:
    """Returns the memory of a rank while a frozen model computes: a reference, a reward model or a teacher."""
    computed = group.section_of(name)
    model = group.frozen[name]
    gathered = training_gathered(model, compute_bytes(computed)) if group.gathers_frozen else 0
    needed = "weights" if group.is_own_reference(name) else name
    computing = replace(kept.needing(needed), gathered_weights=gathered)
    return _forward_pass(group, computing, computed, model, has_logits=FROZEN_MODELS[name].kind == "policy")


def _forward_pass(
    group: Group, computing: Terms, computed: ComputedModelConfig, model: ModelShape, *, has_logits: bool
) -> Terms:
    """Adds to `computing` what a forward pass without gradients needs, with the largest micro-batch of a step."""
    micro_batch = micro_batch_of(group.config, group.role, computed, group.config.data.train_batch_size)
    return replace(computing, **forward_only(model, micro_batch, compute_bytes(computed), has_logits=has_logits))
