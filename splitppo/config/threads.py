"""Chooses the compute threads of each rank if `services.*.threads` is `auto`, and warns of more threads than cores.

The number of threads depends on configuration, device type and permitted cores, never on measured load: the cores are
divided between the ranks that may compute on them. The controller, the scoring processes (`reward.num_workers`) and the
environment processes (`rollout.multi_turn.num_workers`) are not counted.
"""

from collections import Counter
from collections.abc import Collection, Mapping
from fractions import Fraction
from math import floor
from typing import TypeVar

from splitppo.config.schema import Config
from splitppo.config.sections.services import ServiceConfig
from splitppo.machine.cores import PermittedCores

# A rank that computes on a GPU only feeds the GPU: more threads than this have no work.
MAX_GPU_THREADS = 8
R = TypeVar("R", bound=str)  # a role, or any other name of a group of this machine


def threads_of_groups(
    groups: Mapping[R, ServiceConfig], cores: PermittedCores, *, in_turns: Collection[R] = ()
) -> dict[R, int]:
    """Returns the compute threads of each rank, by role: an equal share of every core that the rank may use.

    A share is a whole number of threads, at least 1, and at most MAX_GPU_THREADS for a rank with a GPU. The groups of
    the roles `in_turns` compute one at a time, so on each core only the one with more ranks counts.
    """
    ranks_on = Counter[int]()
    most_in_turns = Counter[int]()
    for role, group in groups.items():
        ranks = Counter(dict.fromkeys(_cores_of(group, cores), group.num_processes))
        if role in in_turns:
            most_in_turns |= ranks
        else:
            ranks_on += ranks
    ranks_on += most_in_turns
    granted = Fraction(1) if cores.quota is None else min(Fraction(1), cores.quota / len(ranks_on))
    threads = {}
    for role, group in groups.items():
        share = max(1, floor(granted * sum(Fraction(1, ranks_on[core]) for core in _cores_of(group, cores))))
        threads[role] = min(share, MAX_GPU_THREADS) if group.devices else share
    return threads


def threads_of_rank(service: ServiceConfig, num_ranks: int, cores: PermittedCores) -> int:
    """Returns the compute threads of each of `num_ranks` ranks of a worker group that is alone on this machine."""
    if service.threads != "auto":
        return service.threads
    return threads_of_groups({"": service.model_copy(update={"num_processes": num_ranks})}, cores)[""]


def crowding(config: Config, cores: PermittedCores) -> str | None:
    """Returns a warning if the worker groups of a resolved `config` have more threads than permitted cores.

    Returns None if there are enough cores, or if the controller does not start the groups itself (`services.launch:
    external`).
    """
    if config.services.launch == "external":
        return None
    return _crowding(config.groups, cores, config.roles_in_turns)


def crowding_of_group(role: str, service: ServiceConfig, num_ranks: int, cores: PermittedCores) -> str | None:
    """Returns a warning if `num_ranks` ranks of one worker group have more threads than permitted cores, or None."""
    threads = threads_of_rank(service, num_ranks, cores)
    return _crowding({role: service.model_copy(update={"num_processes": num_ranks, "threads": threads})}, cores)


def _cores_of(group: ServiceConfig, cores: PermittedCores) -> frozenset[int]:
    return frozenset(group.cpus) or cores.indices


def _crowding(groups: Mapping[R, ServiceConfig], cores: PermittedCores, in_turns: Collection[R] = ()) -> str | None:
    """Returns a warning about the first cores that have more threads than there are cores, or None.

    First all groups are counted together on the cores of all, then each group alone on its own. Of groups that compute
    in turns only the one with the most threads counts among all.
    """
    threads = {role: int(group.threads) for role, group in groups.items()}
    of_each = {role: _cores_of(group, cores) for role, group in groups.items()}
    of_all = PermittedCores(frozenset[int]().union(*of_each.values()), cores.quota)
    waiting = sorted(in_turns, key=lambda role: threads[role] * groups[role].num_processes)[:-1]
    at_once = [role for role in groups if role not in waiting]
    for roles, available in [(at_once, of_all.num_whole), *(([role], len(of_each[role])) for role in groups)]:
        total = sum(threads[role] * groups[role].num_processes for role in roles)
        if total <= available:
            continue
        named = groups if roles is at_once else roles  # also a group whose turn is shorter
        better = threads_of_groups(groups, cores, in_turns=in_turns)
        counted = [f"{groups[role].num_processes} x services.{role}.threads ({threads[role]})" for role in roles]
        lower = [f"services.{role}.threads to {better[role]}" for role in named if threads[role] > better[role]]
        price = f"wait for each other{', which can take several times as long' if lower else ''}"
        fewer = "lower services.*.num_processes, or " if any(groups[role].num_processes > 1 for role in roles) else ""
        advice = f"set {' and '.join(lower)}" if lower else f"{fewer}permit more cores"
        return f"{' + '.join(counted)} = {total} threads compute on {available} permitted cores and {price}: {advice}"
    return None
