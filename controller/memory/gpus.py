"""Finds the GPUs of this machine, and checks that the worker groups of a run fit into their memory."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

from controller.memory.estimate import GroupMemory
from controller.memory.frozen_models import FROZEN_MODELS
from controller.memory.group import num_shards
from controller.memory.passes import longest_row, sequence_ranks
from controller.memory.terms import GIB, label
from splitppo.config import ComputedModelConfig, Config, ConfigError, TrainedModelConfig
from splitppo.config.section import RoleName, TrainedRoleName
from splitppo.machine.gpus import check_offered, total_bytes_of_gpus


def visible_gpus(config: Config) -> dict[int, int]:
    """Returns the bytes of memory of the GPUs that this process may use, as services.*.devices numbers them.

    The bytes are 0 where a GPU shares the memory of the machine. The result is empty if the groups run elsewhere
    (services.launch: external), or no group has devices.
    """
    uses_gpus = any(config.services.of(role).devices for role in config.roles)
    return total_bytes_of_gpus() if config.services.launch == "local" and uses_gpus else {}


def check_devices(config: Config, gpus: Collection[int]) -> None:
    """Checks that this machine has the GPUs of all groups that start on it; else ConfigError for the first group."""
    for role, group in config.groups.items() if config.services.launch == "local" else ():
        check_offered(f"services.{role}.devices", group.devices, len(gpus))


def check_optimizer_offload(config: Config) -> None:
    """Checks that moments are offloaded from GPUs alone; ConfigError for a role that computes on a CPU."""
    for role in config.trained_roles:
        if config.trained_model_of(role).optimizer_offload and not config.services.of(role).devices:
            raise ConfigError(f"{role}.optimizer_offload needs GPUs (services.{role}.devices)")


def find_misfit(config: Config, groups: Iterable[GroupMemory], gpus: Mapping[int, int]) -> str | None:
    """Finds the first GPU whose worker groups need more memory than it has, and returns a sentence; None if all fit.

    Peaks are added up where ranks share a GPU; of groups that take turns there, only one is at its peak. The sentence
    names the GPU, both numbers, the largest part of the memory and the key that lowers it.
    """
    groups = list(groups)
    for device, available in gpus.items():
        here = [(group, count) for group in groups if (count := Counter(group.devices)[device])]
        roles = config.roles_in_turns if device in config.gpus_in_turns else ()
        needed = bytes_in_turns([group for group, _ in here if group.role in roles])
        needed += sum(group.peak.total * count for group, count in here if group.role not in roles)
        if 0 < available < needed:
            return _sentence(config, here, device, available, needed)
    return None


def find_main_memory_misfit(config: Config, groups: Iterable[GroupMemory], available: int) -> str | None:
    """Returns a sentence if ranks with GPUs would offload more than the main memory of this machine; None if it fits.

    `available` are the bytes of main memory; 0 if they are not known. The sentence ends with advice: to divide weights
    that several ranks hold alike; else to keep an optimizer's state in bf16 or not to offload what takes most, or to
    train adapters.
    """
    on_gpus = [group for group in groups if group.devices and config.services.launch == "local"]
    sizes = {key: group.num_ranks * size for group in on_gpus for key, size in group.offloaded.items()}
    if not 0 < available < sum(sizes.values()):
        return None
    one_copy = next(filter(None, (_one_copy(config, role) for role in config.trained_roles)), None)
    largest = max(sizes, key=sizes.__getitem__)
    advice = f"set {largest} to false"
    if role := next((role for role in config.trained_roles if largest.startswith(role)), None):
        trained = config.trained_model_of(role)
        if largest == f"{role}.optimizer_offload" and trained.optimizer_state_dtype == "fp32":
            advice = f"set {role}.optimizer_state_dtype to bf16"
        advice += "" if trained.lora_rank else f", or train adapters ({role}.lora_rank)"
    by_key = ", ".join(f"{size / GIB:.1f} by {key}" for key, size in sizes.items())
    return (
        f"the ranks of this machine would keep {sum(sizes.values()) / GIB:.1f} GiB in main memory ({by_key}), it has"
        f" {available / GIB:.1f} GiB: {one_copy or advice}"
    )


def _one_copy(config: Config, role: TrainedRoleName) -> str | None:
    """Returns advice for a group in which several ranks hold the same weights; None for another group."""
    if num_shards(config, role) == config.services.of(role).num_processes:
        return None
    return f"set {role}.strategy to fsdp2 and {role}.fsdp_size to -1"


def bytes_in_turns(groups: Sequence[GroupMemory]) -> int:
    """Returns the peak bytes of a device that several worker groups share: one computes, the others only keep data."""
    at_rest = [min(terms.total for terms in group.phases.values()) for group in groups]
    peaks = (group.peak.total - rest for group, rest in zip(groups, at_rest, strict=True))
    return sum(at_rest) + max(peaks, default=0)


def _sentence(config: Config, here: Iterable[tuple[GroupMemory, int]], device: int, available: int, needed: int) -> str:
    """Returns what the user reads if a GPU is too small: which groups need how much there, the largest term, a way out.

    `here` has the groups on the GPU, `available` and `needed` are bytes. The largest term is the largest one of any
    group.
    """
    groups = [group for group, _ in here]
    roles = " and ".join(f"{group.role} ({group.peak.total / GIB:.1f} GiB per rank)" for group in groups)
    group = max(groups, key=lambda group: getattr(group.peak, group.peak.largest))
    term = group.peak.largest
    turns = ", in turns" if device in config.gpus_in_turns else ""
    return (
        f"GPU {device} (services.{group.role}.devices) has {available / GIB:.1f} GiB, but the {roles} would need about"
        f" {needed / GIB:.1f} GiB there{turns}; the largest term is {label(term)} of the {group.role} in its phase"
        f" {group.peak_phase} ({getattr(group.peak, term) / GIB:.1f} GiB): {way_out(config, group, term)}"
    )


def way_out(config: Config, group: GroupMemory, term: str) -> str:
    """Returns advice for a group that needs too much memory: a configuration key, and how to change it.

    `term` is the part of the memory that the change lowers, such as "activations".
    """
    # The actor's section has the micro-batches of the reference, and the policy that a rollout group samples with.
    sections = {"generate": "actor"} | {model.phase: model.section for model in FROZEN_MODELS.values()}
    section = sections.get(group.peak_phase, group.role)
    computed: ComputedModelConfig = getattr(config, section)
    generates = group.peak_phase == "generate"
    if term == "gathered_weights" or (term == "weights" and group.role == "rollout"):  # whole on every rank
        if computed.dtype == "fp32":
            return f"set {section}.dtype to bf16"
        return "set rollout.backend to vllm" if generates else f"choose a smaller {section}.model"
    if term == "vllm":
        key = "gpu_memory_utilization" if config.rollout.vllm.kv_cache_gb is None else "kv_cache_gb"
        return f"lower rollout.vllm.{key}"
    if term == "process":
        return f"choose other GPUs in services.{group.role}.devices"
    if term == "reference" and config.uses_critic:
        return f"set placement.reference to {'critic' if group.role == 'actor' else 'actor'}"
    if term in ("reward_model", "teacher") and group.role != "reward":
        return f"set placement.{term} to reward, a group with GPUs of its own"
    if term in ("activations", "logits", "kv_cache"):
        if generates:
            return "lower rollout.max_batch_size"
        keeps = isinstance(computed, TrainedModelConfig) and computed.gradient_checkpointing is not True
        if term == "activations" and group.peak_phase == "backward" and keeps:
            return f"set {section}.gradient_checkpointing to true"
        return _smaller_micro_batches(config, group.role, section, computed)
    return _offload(group, term) or _fewer_bytes_per_rank(config, group, term)


def _offload(group: GroupMemory, term: str) -> str | None:
    """Returns advice to offload `term`, if the phase of the group's peak does not need it; else None."""
    ways = {name: (model.offload_key, {model.phase}) for name, model in FROZEN_MODELS.items()}
    ways["weights"] = (
        f"{group.role}.param_offload",
        {*group.phases}.difference(*(phases for _, phases in ways.values())),
    )
    ways["optimizer"] = f"{group.role}.optimizer_offload", set()  # it steps on buckets
    key, phases = ways.get(term, ("", {group.peak_phase}))
    return None if group.peak_phase in phases or key in group.offloaded else f"set {key} to true"


def _fewer_bytes_per_rank(config: Config, group: GroupMemory, term: str) -> str:
    """Returns advice for a term that neither a smaller batch nor offloading lowers: more ranks, or adapters.

    If several ranks hold the same weights, the advice is to divide them.
    """
    more_ranks = f"raise services.{group.role}.num_processes, with a GPU in services.{group.role}.devices for each"
    if group.role not in ("actor", "critic") or term not in ("weights", "gradients", "optimizer"):
        return more_ranks
    adapters = "" if config.trained_model_of(group.role).lora_rank else f", or train adapters ({group.role}.lora_rank)"
    return _one_copy(config, group.role) or f"{more_ranks}{adapters}"


def _smaller_micro_batches(config: Config, role: RoleName, section: str, computed: ComputedModelConfig) -> str:
    """Returns advice that makes the largest micro-batch of a group smaller: the first key that can still change.

    A micro-batch of one row can be divided only among ranks that share positions, and then by shorter responses.
    """
    rows = computed.ppo_micro_batch_size_per_gpu
    budget = computed.ppo_max_token_len_per_gpu
    together = sequence_ranks(config, role)
    longest = longest_row(config, role, computed)
    if rows is not None and rows > 1:
        return f"lower {section}.ppo_micro_batch_size_per_gpu"
    if rows is None and budget * together > longest:
        return f"lower {section}.ppo_max_token_len_per_gpu"
    if role in config.trained_roles and together < num_shards(config, role):
        return f"raise {role}.ulysses_sequence_parallel_size"
    return "lower data.max_response_length"
