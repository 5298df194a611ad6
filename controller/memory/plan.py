"""The memory plan that --check prints: the estimate of every group as a table."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from controller.memory.estimate import GIB, GroupMemory, estimate_group, estimate_reward_group, label
from controller.memory.model_shape import Kind, ModelShape, UnknownShape, read_model_shape
from splitppo.config import Config
from splitppo.config.section import RoleName


@dataclass(frozen=True)
class MemoryPlan:
    """The groups whose memory can be estimated, and why that of the others cannot."""

    groups: tuple[GroupMemory, ...]
    unknown: Mapping[RoleName, str]

    def __str__(self) -> str:
        tables = ["\n".join(_table(group)) for group in self.groups]
        return "\n".join([*tables, *(f"memory of the {role}: unknown: {why}" for role, why in self.unknown.items())])


def memory_plan(config: Config, gpus: Mapping[int, int]) -> MemoryPlan:
    """Estimates every group of a run; nothing is fetched, and no weight is read.

    `gpus` are the bytes of the GPUs that are known, by index.

    Raises:
        ConfigError: a file of a model is torn.
    """
    groups: list[GroupMemory] = []
    unknown: dict[RoleName, str] = {}
    for role in config.trained_roles:
        sizes = [gpus[device] for device in config.services.of(role).devices if device in gpus]
        kind: Kind = "policy" if role == "actor" else "value"
        try:
            model = read_model_shape(config.model_of(role).model, kind, f"{role}.model")
            has_reference = role == config.reference_host
            reference = read_model_shape(config.actor.model, "policy", "actor.model") if has_reference else None
            reward_model = _reward_model_shape(config) if role == config.reward_model_host else None
        except UnknownShape as reason:
            unknown[role] = str(reason)
            continue
        gpu_bytes = min(sizes, default=None)
        frozen = {"reference": reference, "reward_model": reward_model}
        groups.append(estimate_group(config, role, model, **frozen, gpu_bytes=gpu_bytes))
    if "reward" in config.roles:
        try:
            groups.append(estimate_reward_group(config, _reward_model_shape(config)))
        except UnknownShape as reason:
            unknown["reward"] = str(reason)
    return MemoryPlan(tuple(groups), unknown)


def _reward_model_shape(config: Config) -> ModelShape:
    """As of a value model: a base model with one label."""
    return read_model_shape(config.reward_model.model, "value", "reward_model.model")


def _table(group: GroupMemory) -> Iterator[str]:
    """A line for each term that is not 0, a column for each phase."""
    place = f"GPU {', '.join(map(str, group.devices))}" if group.devices else "CPU"
    yield f"memory of each of {group.num_ranks} ranks of the {group.role} ({place}), GiB, estimated:"
    widths = [max(9, len(name)) for name in group.phases]
    yield _line("", group.phases, widths)
    by_term = {name: [terms.by_name()[name] for terms in group.phases.values()] for name in group.peak.by_name()}
    totals = [terms.total for terms in group.phases.values()]
    for name, sizes in [*by_term.items(), ("total", totals)]:
        if any(sizes):
            yield _line(label(name), (f"{size / GIB:.2f}" if size else "-" for size in sizes), widths)
    largest = group.peak.largest
    yield (
        f"peak {group.peak.total / GIB:.2f} GiB ({group.peak_phase}), of which"
        f" {label(largest)} {group.peak.by_name()[largest] / GIB:.2f} GiB"
    )


def _line(name: str, cells: Iterable[str], widths: Iterable[int]) -> str:
    return f"  {name:18s}" + "".join(f"{cell:>{width + 2}s}" for cell, width in zip(cells, widths, strict=True))
