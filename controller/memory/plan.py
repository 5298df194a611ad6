"""The memory table that --check prints for each worker group, with a check against the memory of the GPUs."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from controller.memory.estimate import GroupMemory, estimate_group
from controller.memory.frozen_models import frozen_models_of
from controller.memory.gpus import find_main_memory_misfit, find_misfit
from controller.memory.terms import GIB, label
from controller.models.shape import Kind, ModelShape, UnknownShape, read_model_shape
from splitppo.config import Config
from splitppo.config.section import RoleName

# (passes, tokens) of services/engine/forward_proof.py: the engine, then the model itself row by row; in bf16 also with
# another attention and beside padding. A model that is trained makes one more pass, in training.
PROOF = {"fp32": (5, 108), "bf16": (10, 262)}
PROOF_IN_TRAINING = (1, 54)


@dataclass(frozen=True)
class MemoryPlan:
    """The estimated memory of all worker groups of a run; as text, one table per group.

    Attributes:
        groups: the groups whose memory can be estimated.
        unknown: the reason for each other group.
        misfit: a sentence on a GPU, or a machine, with too little memory; None if all groups fit.
        proofs: what each rank of a group computes at a start to prove its models, a line for each group.
    """

    groups: tuple[GroupMemory, ...]
    unknown: Mapping[RoleName, str]
    misfit: str | None = None
    proofs: tuple[str, ...] = ()

    def __str__(self) -> str:
        tables = ["\n".join(_table(group)) for group in self.groups]
        unknown = [f"memory of the {role}: unknown: {why}" for role, why in self.unknown.items()]
        return "\n".join([*tables, *unknown, *self.proofs])


def memory_plan(
    config: Config, gpus: Mapping[int, int], main_memory: int = 0, *, image_bytes: int | None = None
) -> MemoryPlan:
    """Estimates the memory of all worker groups of a run; downloads nothing, and reads no weights.

    `gpus` are the bytes of memory of the GPUs by index, as far as they are known; `main_memory` are those of this
    machine, 0 if they are not known; `image_bytes` those of the files of a prompt's images, on average, None likewise.

    Raises:
        ConfigError: a file of a model is incomplete.
    """
    groups: list[GroupMemory] = []
    unknown: dict[RoleName, str] = {}
    proofs: list[str] = []
    for role in config.roles:
        try:
            model, frozen = _read_shapes(config, role)
        except UnknownShape as reason:
            unknown[role] = str(reason)
            continue
        sizes = [gpus[device] for device in config.services.of(role).devices if gpus.get(device)]
        smallest = min(sizes, default=None)
        groups.append(estimate_group(config, role, model, gpu_bytes=smallest, image_bytes=image_bytes, **frozen))
        if role != "rollout":  # it gets its weights later, and is held to the actor's log-probs
            proofs.append(_proof(config, role, model, list(frozen.values())))
    misfit = find_misfit(config, groups, gpus) or find_main_memory_misfit(config, groups, main_memory)
    return MemoryPlan(tuple(groups), unknown, misfit, tuple(proofs))


def _read_shapes(config: Config, role: RoleName) -> tuple[ModelShape, dict[str, ModelShape]]:
    """Reads the shapes of a worker group's models: of its main model, and of the frozen ones by their name in `Terms`.

    Raises:
        UnknownShape: the shape of one of them is not known.
    """
    frozen = {}
    for name, row in frozen_models_of(config, role).items():
        shapes = [read_model_shape(model, row.kind, f"{row.section}.model") for model in row.models(config)]
        num_parameters = sum(shape.num_parameters for shape in shapes)  # of all teachers; the largest computes
        frozen[name] = replace(max(shapes, key=lambda shape: shape.num_parameters), num_parameters=num_parameters)
    main_of_reward = "reward_model" if config.reward_model_host == "reward" else "teacher"
    section = {"rollout": "actor", "reward": main_of_reward}.get(role, role)  # the others have sections of their name
    # A reward model is a base model with one label, too.
    kind: Kind = "policy" if section in ("actor", "teacher") else "value"
    return read_model_shape(config.model_of(role).model, kind, f"{section}.model"), frozen


def _proof(config: Config, role: RoleName, main: ModelShape, frozen: Sequence[ModelShape]) -> str:
    """Says what each rank of a group computes at a start to prove its models; see docs/architectures.md."""
    passes, tokens = PROOF[config.model_of(role).dtype]
    flop = 2 * tokens * sum(model.num_parameters for model in (main, *frozen))
    if role in config.trained_roles:
        passes += PROOF_IN_TRAINING[0]
        flop += 2 * PROOF_IN_TRAINING[1] * main.num_parameters
    compiled = "; before it code is made (compile), a minute or more where inductor's cache does not have it"
    return (
        f"proof of the {role}'s models at each start: {passes} passes of short rows through their weights,"
        f" {flop / 1e12:.2g} TFLOP on each rank{compiled if config.model_of(role).compile else ''}"
    )


def _table(group: GroupMemory) -> Iterator[str]:
    """Yields the lines of a group's memory table: a line for each part of the memory, a column for each phase, in GiB.

    Parts that are 0 in all phases are left out.
    """
    place = f"GPU {', '.join(map(str, group.devices))}" if group.devices else "CPU"
    yield f"memory of each of {group.num_ranks} ranks of the {group.role} ({place}), GiB, estimated:"
    columns = dict(group.phases)
    if group.saving:
        columns["saving (host)" if group.devices else "saving"] = group.saving
    widths = [max(9, len(name)) for name in columns]
    yield _line("", columns, widths)
    by_term = {name: [getattr(terms, name) for terms in columns.values()] for name in vars(group.peak)}
    totals = [terms.total for terms in columns.values()]
    for name, sizes in [*by_term.items(), ("total", totals)]:
        if any(sizes):
            yield _line(label(name), (f"{size / GIB:.2f}" if size else "-" for size in sizes), widths)
    largest = group.peak.largest
    saving = f"; {group.saving.total / GIB:.2f} GiB of main memory while it saves" if group.saving else ""
    yield (
        f"peak {group.peak.total / GIB:.2f} GiB ({group.peak_phase}), of which"
        f" {label(largest)} {getattr(group.peak, largest) / GIB:.2f} GiB{saving}"
    )


def _line(name: str, cells: Iterable[str], widths: Iterable[int]) -> str:
    return f"  {name:18s}" + "".join(f"{cell:>{width + 2}s}" for cell, width in zip(cells, widths, strict=True))
