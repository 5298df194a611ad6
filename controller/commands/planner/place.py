"""A way to place a run on devices, and the configuration keys that place it so."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from splitppo.config import Config, Schedule
from splitppo.config.load import validate
from splitppo.config.section import RoleName
from splitppo.config.sections.services import ServiceConfig

# "colocated": one pool of devices for both models, one call after the other.
Layout = Schedule | Literal["colocated"]
_Kind = Literal["devices", "cpus"]


@dataclass(frozen=True)
class Place:
    """One way to place a run: a schedule, the devices of each worker group, and the host of the reference model.

    Attributes:
        layout: the schedule, or "colocated".
        devices: the number of devices of each worker group; if actor and critic are colocated, "all" has those of both.
        reference: the host of the reference; None without a reference.
        share: the share of the prompts that a rollout group answers; 0 if the actor's group answers all.
        takes_turns: True if the devices of the rollout group are those of the critic.
    """

    layout: Layout
    devices: Mapping[str, int]
    reference: RoleName | None
    share: float
    takes_turns: bool

    def devices_of(self, role: str) -> int:
        """Returns the number of devices that a role's worker group has or shares; 0 if there is no such group."""
        return self.devices.get(role, self.devices.get("all", 0))


def keys_of(config: Config, place: Place) -> dict[str, Any]:
    """Returns the dotted keys, with their values, that give the run of a configuration this placement.

    The indices of GPUs and cores are those of the run, if they are enough; else they count from 0. Colocated models
    have the same devices, and `run.schedule: serial`, so that one call comes after the other.
    """
    is_colocated = place.layout == "colocated"
    keys: dict[str, Any] = {"run.schedule": "serial" if is_colocated else place.layout}
    if place.reference is not None:
        keys["placement.reference"] = place.reference
    if "rollout" in place.devices:
        keys["rollout.share"] = place.share
    indices = _indices(config, place)
    for role in indices:
        for name, value in _group_keys(_service(config, role), indices[role], place).items():
            keys[f"services.{role}.{name}"] = value
    shares_gpus = is_colocated and bool(_service(config, "actor").devices)
    if shares_gpus or (place.takes_turns and config.services.launch == "external"):
        keys["services.allow_shared_devices"] = True
    return keys


def placed(config: Config, place: Place) -> Config:
    """Returns a configuration with the keys that give its run this placement.

    Raises:
        ConfigError: the run cannot have this placement; the message names the numbers of devices.
    """
    tree = config.model_dump(mode="json")
    for key, value in keys_of(config, place).items():
        *sections, name = key.split(".")
        section = tree
        for step in sections:
            section[step] = section[step] or {}  # a run without a rollout group has null there
            section = section[step]
        section[name] = value
    return validate(tree, ", ".join(f"{count} devices of the {role}" for role, count in place.devices.items()))


def arguments(keys: Mapping[str, Any]) -> list[str]:
    """Returns keys with their values as arguments of `python -m controller --config FILE`."""
    return [f"{key}={_text(value)}" for key, value in keys.items()]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))


def _service(config: Config, role: RoleName) -> ServiceConfig:
    """Returns the settings of a role's worker group; those of the critic for a rollout group that the run lacks."""
    service: ServiceConfig | None = getattr(config.services, role)
    return config.services.critic if service is None else service


def _indices(config: Config, place: Place) -> dict[RoleName, Sequence[int]]:
    """Returns the indices of the GPUs or cores of each worker group; groups that share devices have the same indices.

    First the worker groups get consecutive places, counted from 0 separately for GPUs and for cores. Then the places
    become indices: the sorted indices that the run has now, if there are enough of them, else the places themselves.
    """
    twins: dict[RoleName, RoleName] = {}
    if place.layout == "colocated":
        twins["critic"] = "actor"
    if place.takes_turns:
        twins["rollout"] = "critic"
    others: tuple[RoleName, ...] = ("reward", "rollout")
    roles = (*config.trained_roles, *(role for role in others if role in place.devices))
    kinds: dict[RoleName, _Kind] = {role: "devices" if _service(config, role).devices else "cpus" for role in roles}
    num_used = Counter[_Kind]()
    places: dict[RoleName, Sequence[int]] = {}
    for role, kind in kinds.items():
        if role in twins:
            places[role] = places[twins[role]]
        else:
            first = num_used[kind]
            num_used[kind] += place.devices_of(role)
            places[role] = range(first, num_used[kind])
    indices: dict[_Kind, Sequence[int]] = {}
    for kind, count in num_used.items():
        own = sorted({index for role in roles for index in getattr(_service(config, role), kind)})
        indices[kind] = own if len(own) >= count else range(count)
    return {role: [indices[kinds[role]][number] for number in places[role]] for role in roles}


def _group_keys(service: ServiceConfig, indices: Sequence[int], place: Place) -> dict[str, Any]:
    """Returns the keys of a worker group with these GPUs or cores.

    A GPU has one rank. On a CPU the number of ranks stays if it divides the number of cores, else every core gets a
    rank. `cpus`, which binds the worker group to its cores, is set if the run had it, or if a rollout group takes turns
    on the critic's cores: equal `cpus` of both are how a configuration says that they share them.
    """
    if service.devices:
        return {"num_processes": len(indices), "devices": list(indices)}
    num_cores = len(indices)
    num_ranks = service.num_processes if num_cores % service.num_processes == 0 else num_cores
    keys: dict[str, Any] = {"num_processes": num_ranks, "threads": num_cores // num_ranks}
    if service.cpus or place.takes_turns:
        keys["cpus"] = list(indices)
    return keys
