"""Compute threads of each rank, where `services.*.threads` is `auto`, and whether there are more than cores.

A function of configuration, device type and permitted cores, never of measured load: the cores are divided between the
ranks that may compute on them. The controller and the scoring processes (`reward.num_workers`) are not counted.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from math import floor
from pathlib import Path
from typing import Literal

from splitppo.config.schema import Config, ServiceConfig

# A rank that computes on a GPU only feeds it: more threads than this find nothing to do.
MAX_GPU_THREADS = 8


@dataclass(frozen=True)
class PermittedCores:
    """What a process may use of the machine.

    Attributes:
        indices: the cores of its affinity.
        quota: CPU time that its cgroups grant, in cores; None: no limit.
    """

    indices: frozenset[int]
    quota: Fraction | None = None


@dataclass(frozen=True)
class _Ranks:
    """A group's ranks on this machine, and the cores that they may compute on."""

    num_ranks: int
    cores: frozenset[int]
    are_on_gpus: bool


def permitted_cores(root: Path = Path("/")) -> PermittedCores:
    """What this process, and all that it starts, may use; `root` is where /proc and /sys are found."""
    return PermittedCores(frozenset(os.sched_getaffinity(0)), min(_quotas(root), default=None))


def resolve_threads(config: Config, cores: PermittedCores) -> Config:
    """`config` with numbers in place of `auto`, where the controller starts the groups.

    Groups that others start (`services.launch: external`) know their own cores: they resolve it themselves.
    """
    if config.services.launch == "external":
        return config
    automatic = _automatic(_local_groups(config, cores), cores.quota)
    return _with_threads(
        config, {role: automatic[role] for role in automatic if _service(config, role).threads == "auto"}
    )


def keep_threads(config: Config, stored: Config) -> Config:
    """`config` with the numbers that its run has been using in place of `auto`.

    Results on a CPU may depend on the number of threads, so another machine changes nothing; another placement
    (services.launch, num_processes, devices, cpus) is another configuration, and is resolved anew.

    Args:
        config: of the run that is resumed.
        stored: the same run's, as its folder holds it.
    """
    roles = _roles(config)
    if _placement(config, roles) != _placement(stored, roles):
        return config
    known = {role: _service(stored, role).threads for role in roles if _service(config, role).threads == "auto"}
    return _with_threads(config, known)


def threads_of_rank(service: ServiceConfig, num_ranks: int, cores: PermittedCores) -> int:
    """Threads of each of a group's ranks on this machine, where there is no other group."""
    ranks = _ranks(service, num_ranks, cores)
    return _automatic({"": ranks}, cores.quota)[""] if service.threads == "auto" else service.threads


def crowding(config: Config, cores: PermittedCores) -> str | None:
    """One sentence if the groups that the controller starts have more threads than cores; None if all is well.

    Args:
        config: as `resolve_threads` gives it.
        cores: of the controller.
    """
    if config.services.launch == "external":
        return None
    threads = {role: _service(config, role).threads for role in _roles(config)}
    numbers = {role: number for role, number in threads.items() if number != "auto"}
    return _crowding(_local_groups(config, cores), numbers, cores.quota)


def crowding_of_group(role: str, service: ServiceConfig, num_ranks: int, cores: PermittedCores) -> str | None:
    """As `crowding`, of the ranks of one group on this machine."""
    threads = {role: threads_of_rank(service, num_ranks, cores)}
    return _crowding({role: _ranks(service, num_ranks, cores)}, threads, cores.quota)


def _automatic(groups: Mapping[str, _Ranks], quota: Fraction | None) -> dict[str, int]:
    """By role: an equal share of each core for every rank that may compute on it, in whole threads, at least one."""
    ranks_on: Counter[int] = Counter()
    for group in groups.values():
        ranks_on.update(dict.fromkeys(group.cores, group.num_ranks))
    granted = Fraction(1) if quota is None else min(Fraction(1), quota / len(ranks_on))
    threads = {}
    for role, group in groups.items():
        share = max(1, floor(granted * sum(Fraction(1, ranks_on[core]) for core in group.cores)))
        threads[role] = min(share, MAX_GPU_THREADS) if group.are_on_gpus else share
    return threads


def _crowding(groups: Mapping[str, _Ranks], threads: Mapping[str, int], quota: Fraction | None) -> str | None:
    everybody = frozenset[int]().union(*(group.cores for group in groups.values()))
    num_cores = len(everybody) if quota is None else min(len(everybody), max(1, floor(quota)))
    together = [list(groups), *([role] for role in groups)]
    for roles, available in zip(together, [num_cores, *(len(group.cores) for group in groups.values())], strict=True):
        total = sum(threads[role] * groups[role].num_ranks for role in roles)
        if total > available:
            counted = " + ".join(
                f"{groups[role].num_ranks} x services.{role}.threads ({threads[role]})" for role in roles
            )
            better = _automatic(groups, quota)
            lower = [f"services.{role}.threads to {better[role]}" for role in roles if threads[role] > better[role]]
            price = "wait for each other, which can take several times as long" if lower else "take turns"
            advice = f"set {' and '.join(lower)}" if lower else "lower services.*.num_processes, or permit more cores"
            return f"{counted} = {total} threads compute on {available} permitted cores and {price}: {advice}"
    return None


def _local_groups(config: Config, cores: PermittedCores) -> dict[str, _Ranks]:
    services = {role: _service(config, role) for role in _roles(config)}
    return {role: _ranks(service, service.num_processes, cores) for role, service in services.items()}


def _ranks(service: ServiceConfig, num_ranks: int, cores: PermittedCores) -> _Ranks:
    return _Ranks(num_ranks, frozenset(service.cpus) or cores.indices, bool(service.devices))


def _roles(config: Config) -> tuple[str, ...]:
    return ("actor", "critic") if config.uses_critic else ("actor",)


def _placement(config: Config, roles: Iterable[str]) -> tuple[object, ...]:
    services = [_service(config, role) for role in roles]
    return (config.services.launch, *((each.num_processes, each.devices, each.cpus) for each in services))


def _service(config: Config, role: str) -> ServiceConfig:
    service: ServiceConfig = getattr(config.services, role)
    return service


def _with_threads(config: Config, threads: Mapping[str, int | Literal["auto"]]) -> Config:
    changed = {role: _service(config, role).model_copy(update={"threads": number}) for role, number in threads.items()}
    return config.model_copy(update={"services": config.services.model_copy(update=changed)})


def _quotas(root: Path) -> Iterator[Fraction]:
    """The CPU time that each cgroup above this process grants, in cores; cgroup v2 and v1."""
    mounted = root / "sys/fs/cgroup"
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if not controllers:
            for group in _and_above(mounted, path):
                limit, _, period = " ".join(_lines(group / "cpu.max")).partition(" ")
                yield from _quota(limit, period)
        elif "cpu" in controllers.split(","):
            for hierarchy in {mounted / controllers, mounted / "cpu"}:
                for group in _and_above(hierarchy, path):
                    limits = (_lines(group / name) for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us"))
                    yield from _quota(*(" ".join(limit) for limit in limits))


def _and_above(mounted: Path, path: str) -> Iterator[Path]:
    """The folder of a cgroup and of all that hold it; one that a container cannot see has no files."""
    relative = Path(path.strip("/"))
    return (mounted / folder for folder in (relative, *relative.parents))


def _quota(limit: str, period: str) -> Iterator[Fraction]:
    """Microseconds in every period; `max` and -1 are no limit."""
    if limit.isdigit() and period.isdigit() and int(limit) and int(period):
        yield Fraction(int(limit), int(period))


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except OSError:
        return []
